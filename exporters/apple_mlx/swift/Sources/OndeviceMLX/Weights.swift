// Not compiled where it was written; see README.md.

import Foundation
import MLX

/// One block's frozen arrays, or the table's.
final class Block {
    private let url: URL
    private let streamed: Bool
    private var held: [String: MLXArray] = [:]

    init(_ url: URL, streamed: Bool) throws {
        self.url = url
        self.streamed = streamed
        guard FileManager.default.fileExists(atPath: url.path) else {
            throw ArtifactError(message: "\(url.path) is missing; copy the artifact again")
        }
        if !streamed {
            held = try loadArrays(url: url)
            eval(Array(held.values))
        }
    }

    /// MLX reads an array of a file when it is evaluated, so opening a streamed block reads its header alone.
    func get(_ operand: Operand) throws -> MLXArray {
        if held.isEmpty { held = try loadArrays(url: url) }
        guard let whole = held[operand.name] else {
            throw ArtifactError(message: "\(url.path) has no tensor '\(operand.name)'")
        }
        return whole.part(operand)
    }

    func rows(_ name: String, _ numbers: [Int32]) throws -> MLXArray {
        try get(Operand(name: name)).take(MLXArray(numbers), axis: 0)
    }

    /// Nothing uses it in this pass any more; the next pass opens the file again.
    func release() {
        if streamed { held = [:] }
    }
}

extension MLXArray {
    /// What `operand` names of an array.
    func part(_ operand: Operand) -> MLXArray {
        guard operand.axis >= 0 else { return self }
        return self[operand.start ..< operand.stop, axis: operand.axis]
    }
}
