"""Read what comes from outside: JSON, YAML, tensors, tables and the paths that they name.

Adapters, artifacts, checkpoints, models, data files, run files and messages can be damaged or
made to harm. Everything here has limits on depth, size, count and place, and raises `Refused`
for unexpected content; `read_object` raises the error of its caller's kind.
No other module calls `json.loads`, `yaml.safe_load` or a library's reader on such bytes (a test
checks this).
"""

from ondevice.core.untrusted.documents import (
    MOST_BYTES,
    MOST_DEPTH,
    check_depth,
    parse_json,
    parse_row,
    read_json,
    read_object,
    well_formed,
)
from ondevice.core.untrusted.places import check_name, inside, open_plain, read_plain
from ondevice.core.untrusted.refused import Refused
from ondevice.core.untrusted.tensors import TensorHeader, TensorPlace, parse_header, read_header

__all__ = [
    "Refused",
    "MOST_BYTES",
    "MOST_DEPTH",
    "check_depth",
    "parse_json",
    "parse_row",
    "read_json",
    "read_object",
    "well_formed",
    "check_name",
    "inside",
    "open_plain",
    "read_plain",
    "TensorHeader",
    "TensorPlace",
    "parse_header",
    "read_header",
]
