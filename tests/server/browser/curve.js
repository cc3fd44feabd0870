/** The curve without a browser: cuts, thinning, running means. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

// By its text: the page's folder has no package.json that would tell an older Node that this is a module.
const source = readFileSync(new URL("../../../ondevice/server/page/js/curve.js", import.meta.url), "utf8");
const { Curve, runningMean } = await import(`data:text/javascript,${encodeURIComponent(source)}`);

const step = (number, loss) => ({ event: "step", step: number, loss });
const curve = new Curve();
for (let number = 0; number < 50; number += 1) curve.add(step(number, 5 - number / 50));
curve.add({ event: "evaluate", step: 20, loss: 4 });
curve.add({ event: "evaluate", step: 40, loss: 3 });

// A resume cuts what is done again: steps from its step on, evaluations after it.
assert.equal(curve.add({ event: "resume", step: 20 }), true);
assert.deepEqual(curve.smoothed("loss")[0].at(-1), 20);
assert.deepEqual(curve.judged("loss"), [[20], [4]]);
curve.add(step(20, 9));
assert.deepEqual(
  curve.column("loss").map((column) => column.at(-1)),
  [21, 9],
);

// A step that comes again, as it does when a page has both the stored curve and the stream, replaces itself.
for (let number = 18; number < 21; number += 1) curve.add(step(number, 1));
assert.deepEqual(
  curve.column("loss")[0],
  Array.from({ length: 21 }, (_, index) => index + 1),
);
assert.deepEqual(curve.column("loss")[1].slice(-3), [1, 1, 1]);

// A run that begins anew is empty; what is no number is a gap; other events change nothing.
curve.add({ event: "start" });
assert.deepEqual([curve.steps, curve.evaluations], [[], []]);
curve.add(step(0, "nan"));
assert.deepEqual(curve.smoothed("loss"), [[1], [null], [null]]);
assert.equal(curve.add({ event: "checkpoint", step: 1 }), false);

// However long the run is, what is drawn stays small, begins at the first step and ends with every newest one.
const long = new Curve();
for (let number = 0; number < 50_000; number += 1) long.add(step(number, number));
const [x, loss] = long.column("loss");
assert.ok(x.length <= 4000, `${x.length} points`);
assert.deepEqual([x[0], ...x.slice(-3), ...loss.slice(-1)], [1, 49_998, 49_999, 50_000, 49_999]);
assert.ok(x.every((value, index) => index === 0 || value > x[index - 1]));

assert.deepEqual(runningMean([1, 2, 3, null, 5], 2), [1, 1.5, 2.5, 3, 5]);
console.log("{}");
