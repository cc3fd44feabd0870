"""The random generator and the other ops that exported programs need. Reached as
`ondevice.runtime_ops` only."""

if __name__ != "ondevice.runtime_ops":
    raise ImportError(
        f"import ondevice.runtime_ops, not {__name__}: a second copy would be a second registry"
    )
