// ondevice-mlx-host ARTIFACT BATCHES OUT [--learning-rate X] [--stream] [--one-task]
//
// Trains with an artifact of `ondevice export --target apple-mlx`, without Python. BATCHES is a safetensors file with
// `ids` and `labels`, int64 or int32 [steps, rows, tokens]; one JSON line a step goes to standard output, and the
// adapter to the folder OUT, as PEFT keeps one.
#include <cstdio>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "mlx/memory.h"
#include "trainer.h"

namespace mx = mlx::core;

namespace {

std::vector<ondevice::Batch> read_batches(const std::string& path) {
  ondevice::TensorFile file(path);
  mx::array ids = mx::astype(file.read("ids"), mx::int32), labels = mx::astype(file.read("labels"), mx::int32);
  mx::eval(ids, labels);
  if (ids.ndim() != 3 || ids.shape() != labels.shape()) {
    throw std::runtime_error(path + ": expected ids and labels [steps, rows, tokens]");
  }
  int rows = ids.shape(1), length = ids.shape(2), count = rows * length;
  std::vector<ondevice::Batch> found;
  for (int step = 0; step < ids.shape(0); ++step) {
    const int* first = ids.data<int>() + step * count;
    const int* second = labels.data<int>() + step * count;
    found.push_back({rows, length, {first, first + count}, {second, second + count}});
  }
  return found;
}

int train(const std::vector<std::string>& words) {
  std::vector<std::string> places;
  double rate = -1;
  bool streamed = false;
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--learning-rate" && i + 1 < words.size()) {
      rate = std::stod(words[++i]);
    } else if (words[i] == "--stream") {
      streamed = true;
    } else if (words[i] == "--one-task") {
      mx::set_memory_limit(1);  // one task after the other, so that peaks repeat
    } else {
      places.push_back(words[i]);
    }
  }
  if (places.size() != 3) {
    std::cerr << "ondevice-mlx-host ARTIFACT BATCHES OUT [--learning-rate X] [--stream] [--one-task]\n";
    return 2;
  }
  std::vector<ondevice::Batch> batches = read_batches(places[1]);
  ondevice::Trainer trainer(places[0], streamed);
  if (rate < 0) rate = trainer.program().json.at("optimizer").at("learning_rate");
  for (size_t step = 0; step < batches.size(); ++step) {
    mx::reset_peak_memory();
    double loss = trainer.step(batches[step], rate);
    std::printf("{\"step\": %zu, \"loss\": %.9g, \"peak_bytes\": %zu}\n", step, loss, mx::get_peak_memory());
    std::fflush(stdout);
  }
  std::printf("{\"evaluation\": %.9g}\n", trainer.evaluate(batches.back()));
  trainer.save_adapter(places[2]);
  return 0;
}

}  // namespace

int main(int count, char** words) {
  try {
    return train({words + 1, words + count});
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 1;
  }
}
