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
    func get(_ ref: Ref) throws -> MLXArray {
        if held.isEmpty { held = try loadArrays(url: url) }
        guard let whole = held[ref.name] else {
            throw ArtifactError(message: "\(url.path) has no tensor '\(ref.name)'")
        }
        return whole.part(ref)
    }

    func rows(_ name: String, _ numbers: [Int32]) throws -> MLXArray {
        try get(Ref(name: name)).take(MLXArray(numbers), axis: 0)
    }

    /// Nothing uses it in this pass any more; the next pass opens the file again.
    func release() {
        if streamed { held = [:] }
    }
}

extension MLXArray {
    /// What `ref` names of an array.
    func part(_ ref: Ref) -> MLXArray {
        guard ref.axis >= 0 else { return self }
        return self[ref.start ..< ref.stop, axis: ref.axis]
    }
}
