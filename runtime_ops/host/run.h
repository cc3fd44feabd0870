// A run: steps, checkpoints and events, as `ondevice run` makes them, and the adapter at its end.
#pragma once

#include <string>

#include "log.h"

namespace host {

struct Options {
  fs::path artifact, data, out = "runs/default";
  int64_t steps = 100, warmup_steps = 0, checkpoint_every = 100;
  double epochs = 0, learning_rate = 0;  // 0: not given
  double checkpoint_minutes = 5;
  std::string schedule = "constant";
  bool resume = false, overwrite = false, dry_run = false, json = false, quiet = false;
};

// Trains, and returns what `--json` prints; `interrupted` in it if a signal ended the run. Failure as `ondevice run`.
Json run(const Options& options);

// Installs the handlers of SIGINT, SIGTERM and SIGHUP: the first lets the running step end and saves.
void take_signals();

}  // namespace host
