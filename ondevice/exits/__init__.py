"""Ways out: what was trained, in the form that another program reads; one file a form, each checked
before it is there.

`convert` is the way in. A form is a module of this folder that sets `FORM`.
"""

from ondevice.exits.base import Form, form_names, form_of
from ondevice.exits.convert import ConvertReport, convert

__all__ = ["ConvertReport", "Form", "convert", "form_names", "form_of"]
