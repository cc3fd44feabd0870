/** Columns of other names: "text=Body, label=Team". */

import { h, labelled } from "./dom.js";

/** A field of `field=column` pairs; `value()` is an object, `pairs()` a list for a query. */
export function columnsField() {
  const control = h("input", {
    type: "text",
    autocomplete: "off",
    placeholder: "text=Body, label=Team",
    pattern: "\\s*([^=,]+=[^=,]+(,[^=,]+=[^=,]+)*)?\\s*",
    title: "field=column, with commas between",
  });
  const pairs = () =>
    control.value
      .split(",")
      .map((pair) => pair.trim())
      .filter(Boolean);
  return {
    control,
    element: labelled("Columns", control, "The file's column for each field, if their names differ."),
    pairs,
    value: () =>
      Object.fromEntries(
        pairs()
          .filter((pair) => pair.includes("="))
          .map((pair) => pair.split("=", 2).map((part) => part.trim())),
      ),
  };
}
