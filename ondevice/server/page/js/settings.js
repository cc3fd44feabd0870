/** A form for a section of the run file's JSON schema. Only values that differ from the default are sent. */

import { choice, coded, h, labelled, ticked } from "./dom.js";
import { setting } from "./format.js";

/** The schema of a section, and of a method by its name. */
export function sectionOf(schema, name) {
  return schema.$defs[schema.properties[name].$ref.split("/").pop()];
}

/** [name, schema] of every method. */
export function methodsOf(schema) {
  return Object.entries(schema.properties.method.discriminator.mapping).map(([name, ref]) => [
    name,
    schema.$defs[ref.split("/").pop()],
  ]);
}

/**
 * Fields for some keys of a section.
 * @param keys which, in order; all of them if null
 * @param defaults values to show instead of the schema's defaults
 * @returns element; `values()`; `mark(key)` for a refused field
 */
export function fieldsOf(section, keys = null, defaults = {}) {
  const fields = (keys ?? Object.keys(section.properties))
    .filter((key) => key in section.properties)
    .map((key) => {
      const schema = section.properties[key];
      return [key, field(key, schema, defaults[key] ?? schema.default), schema.default];
    });
  return {
    element: h(
      "div",
      { class: "fields" },
      fields.map(([, one]) => one.element),
    ),
    values: () => {
      const found = {};
      for (const [key, one, usual] of fields) {
        const value = one.value();
        if (JSON.stringify(value) !== JSON.stringify(usual ?? null)) found[key] = value;
      }
      return found;
    },
    get: (key) => fields.find(([name]) => name === key)?.[1].value(),
    /** Hide or show a key that is fixed elsewhere. */
    hide: (key, yes) => {
      for (const [name, one] of fields) if (name === key) one.element.hidden = yes;
    },
    mark: (key) => {
      const found = fields.find(([name]) => name === key)?.[1].control;
      found?.setAttribute("aria-invalid", "true");
      found?.addEventListener("input", () => found.removeAttribute("aria-invalid"), { once: true });
      return found;
    },
  };
}

/** "max_length_tokens" as "Max length tokens". */
export function title(key) {
  const words = key.replaceAll("_", " ");
  return words[0].toUpperCase() + words.slice(1);
}

function field(key, schema, value) {
  const options = schema.anyOf ?? [schema];
  const optional = options.some((one) => one.type === "null");
  const values = options.filter((one) => one.type !== "null");
  const kind = values.find((one) => one.const === undefined) ?? values[0] ?? schema;
  const help = plain(schema.description);
  if (kind.const !== undefined) return selected(key, { enum: [kind.const] }, value, help, optional);
  const word = values.find((one) => one.const !== undefined)?.const; // "auto" in addition to numbers, or to yes and no
  if (word && kind.type === "boolean") return selected(key, { enum: [word, true, false] }, value, help, optional);
  if (kind.enum) return selected(key, kind, value, help, optional);
  if (kind.type === "boolean" && !optional) return switched(key, value, help);
  if (kind.type === "array" && kind.items?.enum) return several(key, kind, value, help);
  if (kind.type === "array") return listed(key, kind, value, help);
  if (kind.type === "integer" || kind.type === "number") return numeric(key, kind, value, help, optional, word);
  return written(key, value, help);
}

function selected(key, kind, value, help, optional) {
  const options = kind.enum.map((one) => [String(one), String(one)]);
  const control = choice(optional ? [["", "none"], ...options] : options, value ?? "");
  return {
    control,
    element: labelled(title(key), control, help),
    value: () => kind.enum.find((one) => String(one) === control.value) ?? null,
  };
}

function switched(key, value, help) {
  const { box, element } = ticked(title(key), value === true);
  return {
    control: box,
    element: h("div", { class: "field" }, element, h("small", {}, coded(help))),
    value: () => box.checked,
  };
}

function several(key, kind, value, help) {
  const boxes = kind.items.enum.map((one) => [one, ticked(one, value?.includes(one) ?? false)]);
  const element = h(
    "fieldset",
    { class: "field wide" },
    h("legend", {}, title(key)),
    h(
      "div",
      { class: "ticks" },
      boxes.map(([, box]) => box.element),
    ),
    h("small", {}, coded(help)),
  );
  return {
    control: boxes[0][1].box,
    element,
    value: () => boxes.filter(([, { box }]) => box.checked).map(([one]) => one),
  };
}

/** Free values, separated by commas. */
function listed(key, kind, value, help) {
  const field = written(key, value?.length ? value.join(", ") : null, help);
  const read = kind.items?.type === "integer" ? Number : String;
  return {
    ...field,
    value: () =>
      field.control.value
        .split(",")
        .map((one) => one.trim())
        .filter(Boolean)
        .map(read),
  };
}

function numeric(key, kind, value, help, optional, word) {
  const control = h("input", {
    type: "number",
    step: kind.type === "integer" ? 1 : "any",
    value: value === word ? "" : (value ?? ""),
    min: kind.minimum,
    max: kind.maximum,
    inputmode: kind.type === "integer" ? "numeric" : "decimal",
    required: !optional && !word,
    placeholder: word ?? (optional ? "none" : null),
  });
  return {
    control,
    element: labelled(title(key), control, help),
    value: () => (control.value === "" ? (word ?? null) : Number(control.value)),
  };
}

function written(key, value, help) {
  const control = h("input", {
    type: "text",
    value: value === null || value === undefined ? "" : setting(value),
    autocomplete: "off",
    placeholder: "none",
  });
  return {
    control,
    element: labelled(title(key), control, help),
    value: () => (control.value === "" ? null : control.value),
  };
}

/** A docstring on one line. */
function plain(text) {
  return (text ?? "").replace(/\s+/g, " ");
}
