"""What the course adds to the library: checkers of exercises, pictures, records of measurements, published code."""
