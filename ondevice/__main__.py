"""`python -m ondevice`, for `torchrun -m ondevice`."""

from ondevice.cli.app import run

if __name__ == "__main__":
    run()
