"""Code that the ExecuTorch targets share: lowering, the runtime session, and the order of an
export."""
