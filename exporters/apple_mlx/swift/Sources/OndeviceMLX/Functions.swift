// Not compiled where it was written; see README.md.

import Cmlx
import Foundation
import MLX

/// The stages: `.mlxfn` files that are loaded when they are first called.
final class Functions {
    private let folder: URL
    private let program: Program
    private var loaded: [String: mlx_imported_function] = [:]

    /// Files for Metal; they were made on a Mac, or given another device where they were exported (`manifest.json`).
    init(artifact: URL, program: Program) {
        folder = artifact.appendingPathComponent("functions-gpu")
        self.program = program
    }

    deinit { loaded.values.forEach { _ = mlx_imported_function_free($0) } }

    /// The outputs of `name` by their names.
    func call(_ name: String, _ inputs: [String: MLXArray]) throws -> [String: MLXArray] {
        guard let entry = program.functions[name] else {
            throw ArtifactError(message: "the program has no function '\(name)'")
        }
        let path = folder.appendingPathComponent(entry.file).path
        if loaded[name] == nil {
            try checkVersion(path)
            loaded[name] = mlx_imported_function_new(path)
        }
        let positional = mlx_vector_array_new()
        let named = mlx_map_string_to_array_new()
        var results = mlx_vector_array_new()
        defer {
            mlx_vector_array_free(positional)
            mlx_map_string_to_array_free(named)
            mlx_vector_array_free(results)
        }
        for (key, value) in inputs { mlx_map_string_to_array_insert(named, key, value.ctx) }
        guard mlx_imported_function_apply_kwargs(&results, loaded[name]!, positional, named) == 0 else {
            throw ArtifactError(message: "\(path): the function cannot be called with these shapes")
        }
        var found: [String: MLXArray] = [:]
        for (i, output) in entry.outputs.enumerated() {
            var array = mlx_array_new()
            mlx_vector_array_get(&array, results, i)
            found[output] = MLXArray(array)
        }
        return found
    }

    /// A file begins with the length and the text of the version of MLX that wrote it.
    private func checkVersion(_ path: String) throws {
        guard let data = FileManager.default.contents(atPath: path), data.count > 8 else {
            throw ArtifactError(message: "\(path) cannot be read; copy the artifact again")
        }
        let length = Int(data[0])
        let written = String(decoding: data[8..<min(8 + length, data.count)], as: UTF8.self)
        guard written == program.mlx_version else {
            throw ArtifactError(
                message: "\(path) is of another version of MLX: expected \(program.mlx_version), received \(written)")
        }
    }
}
