/** Exchange a token for the session's cookie; the token itself is not kept. */

import { keepKey, post } from "./api.js";
import { h, labelled } from "./dom.js";
import { attempt, problemPlace } from "./errors.js";

/** The form; `done` is called when the cookie is there. */
export function signInView(main, done) {
  const token = h("input", {
    type: "password",
    autocomplete: "current-password",
    required: true,
    spellcheck: "false",
    name: "token",
  });
  const button = h("button", { class: "main" }, "Sign in");
  const place = problemPlace();
  const show = (error) =>
    error.status === 401 ? place.show({ ...error, message: error.message, status: 0 }) : place.show(error);
  const form = h(
    "form",
    {
      class: "panel narrow",
      onsubmit: async (event) => {
        event.preventDefault();
        const sent = await attempt(
          button,
          { clear: place.clear, show },
          async () => {
            keepKey(await post("/v1/session", { token: token.value }));
            return true;
          },
          "Signed in",
        );
        if (sent) done();
        else token.focus();
      },
    },
    h("input", {
      type: "text",
      name: "username",
      autocomplete: "username",
      value: "ondevice",
      class: "unseen",
      tabindex: "-1",
      "aria-hidden": "true",
    }),
    labelled("Token", token, "Made by `ondevice serve token` on the daemon's machine."),
    place.element,
    h("div", { class: "buttons" }, button),
  );
  main.append(h("h1", {}, "Sign in"), form);
  token.focus();
}
