"""MeSP's baselines: the same gradients by automatic differentiation, and MeZO's; what mesp is
compared with."""
