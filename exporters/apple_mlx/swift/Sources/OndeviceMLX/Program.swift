// Not compiled where it was written; see README.md.

import Foundation

/// What is wrong with an artifact, in words for the user.
public struct ArtifactError: LocalizedError {
    public let message: String
    public var errorDescription: String? { message }
}

/// A range of an array along an axis; axis -1 is all of it.
struct Operand {
    let name: String
    var axis = -1
    var start = 0
    var stop = 0
}

/// One function, or the update of one layer's A and B.
struct Instruction: Decodable {
    let update: String?
    let function: String
    let inputs: [(name: String, operand: Operand)]
    let outputs: [(output: String, name: String)]
    let evaluate: Bool
    let free: [String]

    private enum Keys: String, CodingKey { case update, function, inputs, outputs, evaluate, free }

    private struct Input: Decodable {
        let name: String
        let operand: Operand

        init(from decoder: Decoder) throws {
            var list = try decoder.unkeyedContainer()
            name = try list.decode(String.self)
            operand = Operand(
                name: try list.decode(String.self), axis: try list.decode(Int.self),
                start: try list.decode(Int.self), stop: try list.decode(Int.self))
        }
    }

    init(from decoder: Decoder) throws {
        let values = try decoder.container(keyedBy: Keys.self)
        update = try values.decodeIfPresent(String.self, forKey: .update)
        function = try values.decodeIfPresent(String.self, forKey: .function) ?? ""
        inputs = try (values.decodeIfPresent([Input].self, forKey: .inputs) ?? []).map { ($0.name, $0.operand) }
        outputs = try (values.decodeIfPresent([[String]].self, forKey: .outputs) ?? []).map { ($0[0], $0[1]) }
        evaluate = try values.decodeIfPresent(Bool.self, forKey: .evaluate) ?? true
        free = try values.decodeIfPresent([String].self, forKey: .free) ?? []
    }
}

/// `program.json`.
struct Program: Decodable {
    struct Function: Decodable {
        let file: String
        let outputs: [String]
    }

    struct LoraParameters: Decodable {
        let layer: Int
        let target: String
        let A: String
        let B: String
    }

    struct Optimizer: Decodable {
        let name: String
        let beta1, beta2, eps, weight_decay, learning_rate: Double
    }

    struct InstructionLists: Decodable {
        let embed, final_norm, final_norm_backward, loss, loss_only: [Instruction]
        /// What a layer reads of embeddings of its own, if it does.
        let layer_input: [Instruction]?
    }

    /// The instructions of one kind of block.
    struct Lists: Decodable {
        let forward, backward: [Instruction]
    }

    struct Bucket: Decodable {
        let loss_rows: Int
        let forward, backward: [Instruction]
        let others: [Lists]?

        /// Those of a block of that kind; `forward` and `backward` are kind 0's.
        func lists(_ kind: Int) -> Lists {
            kind == 0 ? Lists(forward: forward, backward: backward) : others![kind - 1]
        }
    }

    let format: Int
    let mlx_version: String
    let layers: Int
    let batch_size: Int
    let tied: Bool
    let parts: [String]
    let optimizer: Optimizer
    let lora_parameters: [LoraParameters]
    let functions: [String: Function]
    let instructions: InstructionLists
    let lengths: [String: Bucket]
    let kinds: [Int]?
    let key_layers: [Int]?

    /// The kind of a layer's block.
    func kind(_ layer: Int) -> Int { kinds?[layer] ?? 0 }

    /// The layer whose keys and values a layer attends to.
    func keyLayer(_ layer: Int) -> Int {
        guard let key_layers, !key_layers.isEmpty else { return layer }
        return key_layers[layer]
    }

    /// Later layers attend to that layer's keys and values, too.
    func lendsKeys(_ layer: Int) -> Bool { (key_layers ?? []).filter { $0 == layer }.count > 1 }

    static func read(_ artifact: URL) throws -> Program {
        let url = artifact.appendingPathComponent("program.json")
        let program = try JSONDecoder().decode(Program.self, from: Data(contentsOf: url))
        guard [2, 3].contains(program.format) else { throw ArtifactError(message: "\(url.path): a program of another format") }
        return program
    }

    /// The table's name of the output head.
    var head: String { tied ? "embedding" : "head" }
}
