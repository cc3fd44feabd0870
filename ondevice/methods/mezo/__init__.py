"""MeZO over the full parameter space: the baseline that P-RGE is measured against."""
