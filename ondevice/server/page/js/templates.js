/** Prompt templates of one's own: a form, and the list of those in the store. */

import { ask, at, get, post } from "./api.js";
import { h, labelled, listing, newId, sure } from "./dom.js";
import { attempt, problemPlace } from "./errors.js";

/** The templates of the store: `all()` is the present list, `load()` asks again. */
export async function ownTemplates(signal) {
  let known = await get("/v1/templates", signal);
  return {
    all: () => known,
    load: async () => {
      known = await get("/v1/templates", signal);
    },
  };
}

/**
 * A form for a new template.
 * @param columns gives the columns of the file at hand, to choose from
 * @param done called with the new template's name
 * @returns `{element, offer}`; `offer()` shows the columns of another file
 */
export function templateForm(columns, done, signal) {
  const list = h("datalist", { id: newId("columns") });
  const name = h("input", { type: "text", maxlength: 64, pattern: "[a-z0-9][a-z0-9_\\-]*", autocomplete: "off" });
  const prompt = h("textarea", { rows: 4, dir: "auto", maxlength: 100000 });
  const label = h("input", { type: "text", autocomplete: "off", value: "label", list: list.id, dir: "auto" });
  const answers = h("textarea", { rows: 3, dir: "auto" });
  const inserts = h("div", { class: "buttons" });
  const place = problemPlace();
  const button = h("button", { type: "button" }, "Save the template");
  const offer = () => {
    const names = columns();
    list.replaceChildren(...names.map((one) => h("option", { value: one })));
    if (names.length && !names.includes(label.value)) label.value = names.at(-1);
    inserts.replaceChildren(
      ...names.map((one) => {
        const insert = h("button", { type: "button", dir: "auto" }, `{${one}}`);
        insert.addEventListener("click", () => {
          prompt.setRangeText(`{${one}}`, prompt.selectionStart, prompt.selectionEnd, "end");
          prompt.focus();
        });
        return insert;
      }),
    );
  };
  button.addEventListener("click", () =>
    attempt(
      button,
      place,
      async () => {
        for (const control of [name, prompt, label]) control.required = true;
        const valid = [name, prompt, label].every((control) => control.reportValidity());
        for (const control of [name, prompt, label]) control.required = false; // the form around it may go on
        if (!valid) return;
        const made = await post("/v1/templates", templateOf(name, prompt, label, answers), signal);
        element.open = false;
        await done(made.name);
      },
      "The template is saved",
    ),
  );
  const element = h(
    "details",
    { class: "inner", ontoggle: offer },
    h("summary", {}, "A template of your own"),
    h(
      "div",
      { class: "fields" },
      labelled("Template name", name, "Small letters, digits, dashes."),
      labelled("The answer is in column", label),
    ),
    labelled("Prompt", prompt, "The text before the answer. `{column}` stands for the value of that column."),
    inserts,
    labelled(
      "Answers to choose from",
      answers,
      "One a line, as `value in the file = text of the answer`. Leave it empty if answers are free texts.",
    ),
    list,
    h("div", { class: "buttons" }, button),
    place.element,
  );
  return { element, offer };
}

function templateOf(name, prompt, label, answers) {
  const lines = answers.value.split("\n").map((line) => line.trim());
  const pairs = lines.filter(Boolean).map((line) => {
    const [value, ...text] = line.split("=");
    return [value.trim(), (text.join("=") || value).trim()];
  });
  return {
    name: name.value,
    prompt: prompt.value,
    label: [label.value],
    ...(pairs.length ? { candidates: Object.fromEntries(pairs) } : {}),
  };
}

/** The store's templates as a list, with a button to delete each. */
export function templateList(templates, place, changed) {
  if (!templates.length) return h("p", {}, "No templates of your own yet.");
  const remover = (one) => {
    const button = h(
      "button",
      { type: "button" },
      "Delete",
      h("span", { class: "unseen" }, ` the template ${one.name}`),
    );
    button.addEventListener("click", async () => {
      if (!(await sure(`Delete the template ${one.name}?`, "Delete"))) return;
      await attempt(
        button,
        place,
        async () => {
          await ask("DELETE", at("/v1/templates", one.name));
          await changed();
        },
        "Deleted",
      );
    });
    return button;
  };
  const columnsOf = (one) =>
    Object.values(one.fields)
      .map(([name]) => name)
      .join(", ");
  return listing(
    "Your templates",
    ["Name", "Columns", "Answers", "Actions"],
    templates.map((one) => [one.name, columnsOf(one), one.labels.join(", ") || "free texts", remover(one)]),
  );
}
