"""Exporters: one program in, one artifact out. Reached as `ondevice.exporters` only."""

if __name__ != "ondevice.exporters":
    raise ImportError(
        f"import ondevice.exporters, not {__name__}: a second copy would be a second registry"
    )
