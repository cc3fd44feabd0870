/** How rows are read: what they hold, a template, and the column of each field, with the file's first rows. */

import { at, get } from "./api.js";
import { choice, h, labelled, setText, table } from "./dom.js";
import { title } from "./settings.js";

const FORMATS = {
  classification: "texts with a label each",
  instruct: "questions with an answer each",
  completion: "beginnings with their continuation",
  text: "running text",
  chat: "conversations",
  multiple_choice: "questions with choices",
  preference: "pairs of a better and a worse answer",
  thumbs: "answers with a rating each",
};
const FIELDS = { instruction: "Question", output: "Answer", input: "Context", system: "System message" };
const SHOWN = 3;

/** A format in words. */
export const formatWords = (name) => FORMATS[name] ?? name;

/**
 * Controls for one file.
 * @param settings the answer of GET /v1/settings; `own` are the templates of the store
 * @param changed called when the user has changed how rows are read
 * @returns `look(base, stored)` reads a file's columns; `options()` is `{task, columns}` of a request
 */
export function readingFields({ formats, templates, own }, changed = () => {}) {
  const task = choice([], "");
  const kind = choice(
    [["", "what the columns' names say"], ...formats.map((one) => [one.name, formatWords(one.name)])],
    "",
  );
  const kindField = labelled("The rows hold", kind);
  const [said, fields, first] = [h("p", { class: "soft" }), h("div", { class: "fields" }), h("div")];
  const rows = h("details", { class: "inner", hidden: true }, h("summary", {}, "The file's first rows"), first);
  const element = h(
    "div",
    { hidden: true },
    h("div", { class: "fields" }, labelled("Prompt template", task), kindField),
    said,
    fields,
    rows,
  );
  let seen = null;
  let stored = {};
  let selects = new Map();
  const template = () => [...templates, ...own()].find((one) => one.name === task.value);

  /** [field, other names of its column, may be left out] of the chosen template or format. */
  const wanted = () => {
    const found = template();
    if (found) return Object.entries(found.fields).map(([field, names]) => [field, names, false]);
    const form = formats.find((one) => one.name === kind.value);
    if (!form) return [];
    return [
      ...form.fields.map((field) => [field, [field], false]),
      ...form.optional.map((field) => [field, [field], true]),
    ];
  };
  /** The likeliest column of a field: the one that was named before, of the same name, or by its values. */
  const likely = (field, names) => {
    const guess = seen.suggested[kind.value]?.[field];
    const { text, label } = { ...seen.suggested.text, ...seen.suggested.classification };
    const role = field === "label" ? label : task.value ? text : undefined;
    return [stored.columns?.[field], ...names, guess, role].find((name) => seen.columns.includes(name)) ?? "";
  };
  const show = () => {
    element.hidden = !seen;
    kindField.hidden = Boolean(task.value);
    selects = new Map();
    const parts = [];
    for (const [field, names, optional] of seen ? wanted() : []) {
      const none = [["", optional ? "none" : "choose a column"]];
      const select = choice([...none, ...seen.columns.map((name) => [name, name])], likely(field, names), {
        required: !optional,
      });
      select.addEventListener("change", changed);
      selects.set(field, { select, names });
      parts.push(labelled(`${FIELDS[field] ?? title(field)} is in column`, select));
    }
    fields.replaceChildren(...parts);
    const plain = seen && !task.value && !kind.value;
    setText(said, plain ? (seen.format ? `Read as ${formatWords(seen.format)}.` : "Say what the rows hold.") : "");
    kind.required = Boolean(seen && !seen.format && !task.value);
  };
  for (const control of [task, kind]) {
    control.addEventListener("change", () => {
      show();
      if (seen) changed();
    });
  }
  const fill = () => {
    const kept = task.value;
    task.replaceChildren(
      h("option", { value: "" }, "none: the rows as they are"),
      ...own().map((one) => h("option", { value: one.name }, `${one.name} (your own)`)),
      ...templates.map((one) => h("option", { value: one.name }, one.name)),
    );
    if ([...task.options].some((option) => option.value === kept)) task.value = kept;
  };
  fill();
  show();
  return {
    element,
    task,
    columns: () => seen?.columns ?? [],
    fill,
    /** Look at a file under a path of the API. What it was uploaded with comes first. */
    look: async (base, before = {}, signal = undefined) => {
      const found = await get(`${base}/columns`, signal);
      seen = found;
      stored = before;
      if (before.task) task.value = before.task;
      const named = Object.keys(before.columns ?? {});
      const likeliest = found.format ? "" : (Object.keys(found.suggested)[0] ?? "");
      const fits = formats.find((one) => named.length && one.fields.every((field) => named.includes(field)));
      kind.value = fits?.name ?? likeliest;
      first.replaceChildren(
        table(
          `The first ${Math.min(SHOWN, found.rows.length)} rows`,
          found.columns,
          found.rows.slice(0, SHOWN).map((row) => found.columns.map((name) => row[name] ?? "")),
        ),
      );
      rows.hidden = !found.rows.length;
      show();
      return found;
    },
    /** Whether the file's own names suffice, or the template's columns are there. */
    suffices: () =>
      Boolean(seen) &&
      (task.value
        ? [...selects.values()].every(({ select, names }) => names.includes(select.value))
        : seen.format !== null),
    valid: () =>
      [kind, ...[...selects.values()].map(({ select }) => select)].every((control) => control.reportValidity()),
    forget: () => {
      seen = null;
      stored = {};
      rows.hidden = true;
      show();
    },
    options: () => {
      const pairs = [...selects]
        .filter(([, { select, names }]) => select.value && !(task.value && names.includes(select.value)))
        .map(([field, { select }]) => [field, select.value]);
      return {
        ...(task.value ? { task: task.value } : {}),
        ...(pairs.length ? { columns: Object.fromEntries(pairs) } : {}),
      };
    },
    mark: (key) => (key === "task" ? task : key === "columns" ? ([...selects.values()][0]?.select ?? kind) : null),
  };
}

/** The path of a data set or of an upload. */
export const setPath = (id) => at("/v1/datasets", id);
