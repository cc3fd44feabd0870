"""Will a run fit, how long does a step take, and does this machine work.

`estimate.plan`, `fits.does_not_fit`, `devices.find_device`, `doctor.doctor`, and their tables in `render`. They are
imported from their modules, because two of them have the name of their module.
"""
