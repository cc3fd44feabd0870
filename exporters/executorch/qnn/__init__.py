"""The NPU's part of a program: the blocks as one delegate, and the step around it."""
