from ..bench.multi_gpu import main

main()
