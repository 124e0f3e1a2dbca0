"""Guesses are understood however a reader writes a number, and what cannot be understood is answered in words."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from ringlearn.course.checks.predictions import Prediction


def judged(guess, answer, unit="", tolerance=0.0):
    return Prediction("q", lambda: answer, "Why.", tolerance, unit)(guess)


@pytest.mark.parametrize(
    ("guess", "answer", "unit"),
    [
        ("3/4", 0.75, ""), (" 0.75 ", 0.75, ""), ("75%", 0.75, ""), ("75 per cent", 0.75, ""),
        (Fraction(3, 4), 0.75, ""),
        (torch.tensor(0.75), 0.75, ""), ("512 KiB", 524_288, "bytes"), ("0.5 MiB", 524_288, "bytes"),
        ("524,288", 524_288, "bytes"), ("524288 bytes", 524_288, "bytes"), ("524.288 kB", 524_288, "bytes"),
        ("2^19", 524_288, "bytes"), ("4 TB", 4, "TB"), ("4e12 bytes", 4, "TB"), ("4", 4, "TB"),
        ("4 * 10^12 B", 4, "TB"),
        ("0.256 GiB", 262.144, "MiB"), (67, 67, "%"), ("67%", 67, "%"), ("67 percent", 67, "%"), ("0.67", 67, "%"),
        (0.67, 67, "%"), ("150%", 150, "%"), ("3 hops", 3, ""), ("2.5x", 2.5, ""), ("46 ms", 46, "ms"),
        ("0.046 s", 46, "ms"), ("148 µs", 148, "us"), ("-1/2", -0.5, ""), ("−0.5", -0.5, ""),
        ("4 x 2^30", 2**32, "bytes"), ("DV", "dv", ""),
    ],
)  # fmt: skip
def test_a_right_guess_is_right_in_whatever_form(guess, answer, unit):
    result = judged(guess, answer, unit)
    assert result and "near enough" not in result.message


@pytest.mark.parametrize(
    ("guess", "answer", "unit"),
    [
        ("512 KB", 524_288, "bytes"), ("4 KiB", 4, "TB"), ("0.67%", 67, "%"), (0.99, 99, ""), ("67%", 67, ""),
        ("3/5", 0.75, ""), (670, 67, "%"), ("4 s", 4, "ms"),
    ],
)  # fmt: skip
def test_a_wrong_guess_is_wrong_in_whatever_form(guess, answer, unit):
    result = judged(guess, answer, unit)
    assert not result and f"you said {guess}, it is " in result.message


@pytest.mark.parametrize(
    ("guess", "unit", "due"),
    [
        ("many", "", "write a number, not 'many'"), ("5 ms", "bytes", "write a number of bytes, not '5 ms'"),
        ("5 KiB", "", "write a number, not '5 KiB'"), ("3,9", "", "write a number"), ("1/0", "", "write a number"),
        ("9**9**9", "", "write a number"), ("__import__('os')", "", "write a number"),
        ("5 KiB", "%", "write a number in per cent"),
    ],
)  # fmt: skip
def test_what_is_no_number_is_asked_for_in_words(guess, unit, due):
    result = judged(guess, 5, unit)
    assert result.status == "failed" and due in result.message and "it is" not in result.message


def test_how_far_a_guess_was_off_is_told_in_the_unit_of_the_question():
    assert "right (near enough to 67%)." in judged("2/3", 67, "%", 1).message
    assert "you said 1 MiB, it is 524,288 bytes." in judged("1 MiB", 524_288, "bytes").message
