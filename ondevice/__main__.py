"""`python -m ondevice`, for `torchrun -m ondevice`."""

from ondevice.cli import main

if __name__ == "__main__":
    main()
