/** Elements, live announcements, and lists that keep their focus while they change. */

const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "indeterminate"]);

/** An element: `h("p", {class: "note", onclick: f}, "text", child)`. Text stays text; null and false are left out. */
export function h(name, props = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (PROPERTIES.has(key)) element[key] = value;
    else if (value !== false) element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

/** Say something to a screen reader; sighted people see it where it happens. */
export function announce(text) {
  document.getElementById("said").textContent = text;
}

/** Set an element's text only when it is another: a selection and a reader's place stay. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Make `parent` hold one child an item, in order. Children are kept by key, so that focus, selection and scrolling
 * survive an update.
 * @param make gives `{element, update}` for an item that is new
 */
export function keyed(parent, items, keyOf, make) {
  const known = (parent.keyedRows ??= new Map());
  const keys = new Set(items.map(keyOf));
  for (const [key, row] of known) {
    if (!keys.has(key)) {
      row.element.remove();
      known.delete(key);
    }
  }
  items.forEach((item, index) => {
    const key = keyOf(item);
    if (!known.has(key)) known.set(key, make(item));
    const row = known.get(key);
    row.update(item);
    if (parent.children[index] !== row.element) parent.insertBefore(row.element, parent.children[index] ?? null);
  });
}

/** Hide or show; a hidden element that had the focus hands it to the next one in its group. */
export function showOnly(elements, visible) {
  const lost = elements.find((element) => element === document.activeElement && !visible.includes(element));
  for (const element of elements) element.hidden = !visible.includes(element);
  if (lost) (visible[0] ?? lost.closest("[tabindex]"))?.focus();
}

let numbers = 0;

/** An id that no other element has. */
export function newId(prefix) {
  numbers += 1;
  return `${prefix}-${numbers}`;
}

/** A control with its label, and a line of help that is read with it. */
export function labelled(text, control, help = null, kind = "field") {
  control.id ||= newId("c");
  const about = help ? h("small", { id: `${control.id}-help` }, coded(help)) : null;
  if (about) control.setAttribute("aria-describedby", about.id);
  return h("div", { class: kind }, h("label", { for: control.id }, text), control, about);
}

/** A checkbox with its label behind it. */
export function ticked(text, checked = false, props = {}) {
  const box = h("input", { type: "checkbox", checked, ...props });
  return { box, element: h("label", { class: "tick" }, box, " ", h("span", { dir: "auto" }, text)) };
}

/** A choice: `options` are [value, text] pairs. */
export function choice(options, value, props = {}) {
  const select = h(
    "select",
    props,
    options.map(([key, text]) => h("option", { value: key }, text)),
  );
  if (value !== undefined && value !== null) select.value = value;
  return select;
}

/** A list of terms, as [term, description] pairs; those without a description are left out. */
export function terms(pairs, kind = "terms") {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h(
    "dl",
    { class: kind },
    shown.map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", { dir: "auto" }, value))),
  );
}

/** A table of a list that grows: its first rows, and a button for all. */
export function listing(caption, heads, rows) {
  return folded(table(caption, heads, rows)).element;
}

const SHOWN = 8;
const SHOWN_NARROW = 4; // as the style sheet has them

/** A table of which the first rows are shown, with a button for all: on a phone each row is a card, and fewer are. */
export function folded(made) {
  const button = h("button", { type: "button", class: "all" });
  const update = () => {
    const count = made.tBodies[0].rows.length;
    button.hidden = count <= SHOWN_NARROW || !made.classList.contains("folded");
    button.classList.toggle("narrow", count <= SHOWN);
    setText(button, `Show all ${count}`);
  };
  button.addEventListener("click", () => {
    const next = [...made.tBodies[0].rows].find((row) => !row.checkVisibility());
    made.classList.remove("folded");
    next?.querySelector("a, button")?.focus();
    update();
  });
  made.classList.add("folded");
  update();
  return { element: h("div", { class: "list" }, made, button), update };
}

/** A table that becomes a list of cards on a narrow screen. `rows` hold strings or elements. */
export function table(caption, heads, rows) {
  const cell = (value, index) =>
    index === 0
      ? h("th", { scope: "row", dir: "auto" }, value)
      : h("td", { "data-label": heads[index], dir: "auto" }, value);
  return h(
    "table",
    { class: "cards" },
    h("caption", {}, caption),
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        heads.map((head) => h("th", { scope: "col" }, head)),
      ),
    ),
    h(
      "tbody",
      {},
      rows.map((row) => h("tr", {}, row.map(cell))),
    ),
  );
}

/** Text in which `backticks` mark code, as the program's own words have them. */
export function coded(text) {
  const parts = text.split("`");
  return parts.length % 2 ? parts.map((part, index) => (index % 2 ? h("code", {}, part) : part)) : [text];
}

/** Ask before something that cannot be undone. */
export function sure(question, yes) {
  return new Promise((resolve) => {
    const title = newId("ask");
    const dialog = h(
      "dialog",
      { "aria-labelledby": title },
      h(
        "form",
        { method: "dialog" },
        h("p", { id: title, dir: "auto" }, question),
        h(
          "div",
          { class: "buttons" },
          h("button", { value: "no" }, "Go back"),
          h("button", { value: "yes", class: "danger" }, yes),
        ),
      ),
    );
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
