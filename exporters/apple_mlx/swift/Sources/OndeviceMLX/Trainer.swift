// Not compiled where it was written; see README.md.

import Foundation
import MLX

/// Rows of the program's batch size, padded on the right to one of its lengths; labels are -100 where nothing is trained.
public struct Batch {
    public let rows, length: Int
    public let ids, labels: [Int32]

    public init(rows: Int, length: Int, ids: [Int32], labels: [Int32]) {
        (self.rows, self.length, self.ids, self.labels) = (rows, length, ids, labels)
    }
}

/// Trains with an artifact of `ondevice export --target apple-mlx`. Not to be called from two threads.
public final class Trainer {
    private static let prefix = "base_model.model."
    private let artifact: URL
    private let program: Program
    private let functions: Functions
    private let blocks: [Block]
    private let table, final: Block
    private var adapter: [[String: MLXArray]]
    private var moments: [String: (MLXArray, MLXArray)] = [:]
    private var scalars: [String: MLXArray] = [:]
    private var steps = 0
    /// Of the pass: its tokens and the first block's input, if layers have inputs of their own; and by layer the keys and
    /// values that later layers read, with the sums of their gradients.
    private var ids: [Int32] = []
    private var embedded: MLXArray?
    private var shared: [Int: [String: MLXArray]] = [:]

    /// - Parameter streamed: read each block's weights again in every pass, instead of keeping them in memory.
    public init(artifact: URL, streamed: Bool) throws {
        self.artifact = artifact
        program = try Program.read(artifact)
        functions = Functions(artifact: artifact, program: program)
        let weights = artifact.appendingPathComponent("weights")
        blocks = try (0 ..< program.layers).map {
            try Block(weights.appendingPathComponent(String(format: "block-%05d.safetensors", $0)), streamed: streamed)
        }
        table = try Block(weights.appendingPathComponent("table.safetensors"), streamed: streamed)
        final = try Block(weights.appendingPathComponent("final.safetensors"), streamed: streamed)
        adapter = Array(repeating: [:], count: program.layers)
        let start = try loadArrays(url: artifact.appendingPathComponent("adapter/adapter_model.safetensors"))
        for one in program.lora_parameters {
            for (side, name) in [("A", one.A), ("B", one.B)] {
                guard let value = start[Self.prefix + name] else {
                    throw ArtifactError(message: "the artifact's adapter lacks \(name)")
                }
                adapter[one.layer]["\(one.target).\(side)"] = value
            }
        }
    }

    /// One optimizer step; the mean loss in nats a labelled token.
    public func step(_ batch: Batch, learningRate: Double) throws -> Double {
        let bucket = try self.bucket(batch)
        begin(learningRate)
        var inputs = [try embed(batch)]
        for layer in 0 ..< program.layers {
            inputs.append(try forward(layer, bucket, inputs[layer]))
        }
        var (sum, g) = try loss(inputs.removeLast(), batch, bucket.loss_rows, gradient: true)
        for layer in (0 ..< program.layers).reversed() {
            let given = ["x": inputs.removeLast(), "g": g!]
            g = nil
            g = try backward(layer, bucket, given)
        }
        return sum
    }

    /// Mean loss without a step.
    public func evaluate(_ batch: Batch) throws -> Double {
        let bucket = try self.bucket(batch)
        var x = try embed(batch)
        for layer in 0 ..< program.layers {
            x = try forward(layer, bucket, x)
        }
        return try loss(x, batch, bucket.loss_rows, gradient: false).0
    }

    /// A folder in PEFT's layout, written beside its place and renamed.
    public func saveAdapter(to folder: URL) throws {
        var tensors: [String: MLXArray] = [:]
        for one in program.lora_parameters {
            tensors[Self.prefix + one.A] = adapter[one.layer]["\(one.target).A"]
            tensors[Self.prefix + one.B] = adapter[one.layer]["\(one.target).B"]
        }
        let files = FileManager.default
        let partial = folder.appendingPathExtension("partial")
        try? files.removeItem(at: partial)
        try files.createDirectory(at: partial, withIntermediateDirectories: true)
        try save(arrays: tensors, url: partial.appendingPathComponent("adapter_model.safetensors"))
        try files.copyItem(
            at: artifact.appendingPathComponent("adapter/adapter_config.json"),
            to: partial.appendingPathComponent("adapter_config.json"))
        try? files.removeItem(at: folder)
        try files.moveItem(at: partial, to: folder)
    }

    private func bucket(_ batch: Batch) throws -> Program.Bucket {
        guard batch.rows == program.batch_size, let found = program.lengths[String(batch.length)] else {
            throw ArtifactError(message: "the program has no functions for \(batch.rows) rows of \(batch.length) tokens")
        }
        return found
    }

    private func begin(_ learningRate: Double) {
        steps += 1
        let optimizer = program.optimizer
        var rate = learningRate
        scalars = ["kept": MLXArray(Float(1 - learningRate * optimizer.weight_decay))]
        if optimizer.name == "adamw" {
            rate /= 1 - pow(optimizer.beta1, Double(steps))
            scalars["root"] = MLXArray(Float((1 - pow(optimizer.beta2, Double(steps))).squareRoot()))
            scalars["constants"] = MLXArray([Float(optimizer.beta1), Float(optimizer.beta2), Float(optimizer.eps)])
        }
        scalars["rate"] = MLXArray(Float(rate))
    }

    private func embed(_ batch: Batch) throws -> MLXArray {
        var rows: [String: MLXArray] = [:]
        for part in program.parts { rows["rows.\(part)"] = try table.rows("embedding.\(part)", batch.ids) }
        let made = try run(program.instructions.embed, rows, table, [:])["x"]!
        let x = made.reshaped([batch.rows, batch.length, -1])
        shared = [:]
        if program.instructions.layer_input != nil { (ids, embedded) = (batch.ids, x) }
        return x
    }

    private func forward(_ layer: Int, _ bucket: Program.Bucket, _ x: MLXArray) throws -> MLXArray {
        var given = try inputs(layer)
        given["x"] = x
        let left = try run(bucket.lists(program.kind(layer)).forward, given, blocks[layer], adapter[layer])
        blocks[layer].release()
        if program.lendsKeys(layer) { shared[layer] = ["k": left["k"]!, "v": left["v"]!] }
        return left["x"]!
    }

    /// Takes x and g, the gradient of the block's output; gives that of its input.
    private func backward(_ layer: Int, _ bucket: Program.Bucket, _ given: [String: MLXArray]) throws -> MLXArray {
        var given = given.merging(try inputs(layer)) { first, _ in first }
        let lender = program.keyLayer(layer)
        if let keys = shared[lender] {
            for name in ["k", "v"] {
                given["g.\(name)"] = keys["g.\(name)"] ?? MLXArray.zeros(keys[name]!.shape, dtype: .float32)
            }
        }
        let left = try run(bucket.lists(program.kind(layer)).backward, given, blocks[layer], adapter[layer]) { target, a, b in
            try self.update(layer, target, a, b)
        }
        blocks[layer].release()
        if lender != layer {
            for name in ["g.k", "g.v"] { shared[lender]![name] = left[name] }
        }
        return left["g"]!
    }

    /// What a block reads in addition to the residual stream: its layer's input, and another layer's keys and values.
    private func inputs(_ layer: Int) throws -> [String: MLXArray] {
        var found: [String: MLXArray] = [:]
        if let calls = program.instructions.layer_input, let embedded {
            var given = ["x": embedded]
            for part in program.parts { given["rows.\(part)"] = try blocks[layer].rows("layer_rows.\(part)", ids) }
            found = try run(calls, given, blocks[layer], [:])
        }
        if let keys = shared[program.keyLayer(layer)], program.keyLayer(layer) != layer {
            found["k"] = keys["k"]
            found["v"] = keys["v"]
        }
        return found
    }

    /// The mean loss, and the gradient of x for it.
    private func loss(_ x: MLXArray, _ batch: Batch, _ size: Int, gradient: Bool) throws -> (Double, MLXArray?) {
        var places: [Int32] = []
        var labels: [Int32] = []
        for row in 0 ..< batch.rows {
            for token in 0 ..< batch.length - 1 {
                let place = row * batch.length + token
                guard batch.labels[place + 1] >= 0 else { continue }
                places.append(Int32(place))
                labels.append(batch.labels[place + 1])
            }
        }
        guard !places.isEmpty else { throw ArtifactError(message: "no token of the batch is labelled") }
        let hn = try run(program.instructions.final_norm, ["x": x], final, [:])["hn"]!.reshaped([batch.rows * batch.length, -1])
        var ghn = MLXArray.zeros(hn.shape, dtype: .float32)
        var total = 0.0
        for low in stride(from: 0, to: places.count, by: size) {
            let count = min(size, places.count - low)
            let padding = [Int32](repeating: 0, count: size - count)
            let place = MLXArray(Array(places[low ..< low + count]) + padding)
            var given = try functions.call("gather_rows", ["all": hn, "place": place])
            if gradient {
                let weight = (0 ..< size).map { $0 < count ? Float(1.0 / Double(places.count)) : 0 }
                given["weight"] = MLXArray(weight)
            }
            let wanted = Array(labels[low ..< low + count]) + padding
            for part in program.parts { given["rows.\(part)"] = try table.rows("\(program.head).\(part)", wanted) }
            let calls = gradient ? program.instructions.loss : program.instructions.loss_only
            let found = try run(calls, given, table, [:], head: program.head)
            if gradient {
                ghn = try functions.call("scatter_rows", ["ghn": ghn, "place": place, "gh": found["gh"]!])["ghn"]!
                eval(ghn)
            }
            total += Double(found["nll"]![0 ..< count].sum().item(Float.self))
        }
        table.release()
        let mean = total / Double(places.count)
        guard gradient else { return (mean, nil) }
        let given = ["x": x, "ghn": ghn.reshaped(x.shape)]
        return (mean, try run(program.instructions.final_norm_backward, given, final, [:])["g"])
    }

    /// Runs instructions: calls, evaluates where it says so, drops what is dead, gives back freed memory.
    private func run(
        _ calls: [Instruction], _ given: [String: MLXArray], _ weights: Block, _ adapter: [String: MLXArray],
        head: String? = nil, update: ((String, MLXArray, MLXArray) throws -> Void)? = nil
    ) throws -> [String: MLXArray] {
        var held = given
        var pending: [String] = []
        for call in calls {
            if let target = call.update {
                let a = held.removeValue(forKey: "\(target).dA")!, b = held.removeValue(forKey: "\(target).dB")!
                try update?(target, a, b)
                continue
            }
            var inputs: [String: MLXArray] = [:]
            for (name, operand) in call.inputs {
                if let found = held[operand.name] ?? adapter[operand.name] {
                    inputs[name] = found.part(operand)
                } else {
                    var place = operand
                    if let head, operand.name.hasPrefix("head.") {
                        place = Operand(name: head + operand.name.dropFirst(4), axis: operand.axis, start: operand.start, stop: operand.stop)
                    }
                    inputs[name] = try weights.get(place)
                }
            }
            let made = try functions.call(call.function, inputs)
            for (output, name) in call.outputs {
                held[name] = made[output]
                pending.append(name)
            }
            call.free.forEach { held[$0] = nil }
            guard call.evaluate else { continue }
            eval(pending.compactMap { held[$0] })
            pending = []
            Memory.clearCache()
        }
        return held
    }

    private func update(_ layer: Int, _ target: String, _ a: MLXArray, _ b: MLXArray) throws {
        for (side, gradient) in [("A", a), ("B", b)] {
            let name = "\(target).\(side)", key = "\(layer).\(name)"
            let value = adapter[layer][name]!
            var given = scalars.merging(["value": value, "gradient": gradient]) { first, _ in first }
            if program.optimizer.name == "adamw" {
                let (first, second) = moments[key] ?? (MLXArray.zeros(like: value), MLXArray.zeros(like: value))
                given["first"] = first
                given["second"] = second
            }
            let made = try functions.call(program.optimizer.name, given)
            adapter[layer][name] = made["value"]
            if let first = made["first"], let second = made["second"] { moments[key] = (first, second) }
            eval(Array(made.values))
        }
    }
}
