// Trains with a program: forward through the blocks, loss, backward with A and B updated as their gradients arise.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "program.h"

namespace ondevice {

// Rows of `batch_size` padded to a bucket's length; labels are -100 where nothing is trained.
struct Batch {
  int rows, length;
  std::vector<int> ids, labels;
};

class Trainer {
 public:
  // Reads the adapter that the artifact begins with.
  Trainer(const std::string& folder, bool streamed);

  // One optimizer step; the mean loss in nats a labelled token.
  double step(const Batch& batch, double learning_rate);
  // Mean loss without a step.
  double evaluate(const Batch& batch);
  // A folder that PEFT and ondevice load.
  void save_adapter(const std::string& folder) const;
  const Program& program() const { return program_; }

 private:
  const Bucket& bucket(const Batch& batch) const;
  mx::array embed(const Batch& batch);
  mx::array forward(int layer, const Bucket& bucket, const mx::array& x);
  // Takes x and g, the gradient of the block's output, so that they can go; gives that of its input.
  mx::array backward(int layer, const Bucket& bucket, Arrays given);
  // What a block reads in addition to the residual stream: its layer's input, and another layer's keys and values.
  Arrays inputs(int layer);
  // The summed loss; with `gradient`, the gradient of x for (sum / labelled).
  double loss(const mx::array& x, const Batch& batch, int loss_rows, mx::array* gradient);
  void update(int layer, const std::string& target, const mx::array& a, const mx::array& b);
  mx::array updated(const std::string& name, const mx::array& value, const mx::array& gradient);

  std::string folder_;
  Program program_;
  std::vector<Arrays> adapter_;
  Arrays first_, second_, scalars_;
  // Of the pass: the tokens and the first block's input, if layers have inputs of their own; and by layer the keys and
  // values that later layers read, with the sums of their gradients.
  std::vector<int> ids_;
  Arrays embedded_;
  std::unordered_map<int, Arrays> shared_;
  int steps_ = 0;
};

}  // namespace ondevice
