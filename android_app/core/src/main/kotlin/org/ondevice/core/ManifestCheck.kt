package org.ondevice.core

/** What must agree inside one manifest, so that a wrong one is refused before a program is loaded. */
internal object ManifestCheck {
    private const val HINT = "export the model again"
    private val HEX = Regex("[0-9a-f]{64}")

    /** The B matrices lie inside the adapter vector, ascending and apart. */
    fun layout(manifest: Manifest) {
        if (manifest.lengthsTokens.isEmpty()) throw wrong("lengths_tokens", "at least one length", "none")
        if (manifest.adapter.isEmpty()) throw wrong("adapter", "at least one matrix", "none")
        var end = 0
        for ((index, entry) in manifest.adapter.withIndex()) {
            if (entry.offset < end || entry.offset.toLong() + entry.rank.toLong() * entry.outputs > manifest.adapterSize) {
                throw wrong(
                    "adapter.$index (${entry.linear})", "a range behind element $end and inside ${manifest.adapterSize} elements",
                    "offset ${entry.offset}, ${entry.rank} x ${entry.outputs}",
                )
            }
            end = entry.offset + entry.count
        }
    }

    /** Every length has its training step and its evaluation, with the shapes that the manifest announces. */
    fun methods(manifest: Manifest) {
        if (manifest.oneMethod) {
            if (manifest.evalBatchSize != manifest.method.copies * manifest.batchSize) {
                throw wrong("eval_batch_size", "${manifest.method.copies} copies of ${manifest.batchSize} rows", manifest.evalBatchSize)
            }
            return manifest.lengthsTokens.forEach { length ->
                val name = manifest.methodFor("train_step", length)
                inputs(manifest, name, manifest.evalBatchSize, length)
                stepOutputs(manifest, name)
                evaluateOutputs(manifest, name)
            }
        }
        for (length in manifest.lengthsTokens) {
            val (train, evaluate) = listOf("train_step", "evaluate").map { manifest.methodFor(it, length) }
            inputs(manifest, train, manifest.batchSize, length)
            stepOutputs(manifest, train)
            inputs(manifest, evaluate, manifest.evalBatchSize, length)
            evaluateOutputs(manifest, evaluate)
        }
    }

    /** Every listed file stays inside the folder, the program and the tokenizer among them. */
    fun names(manifest: Manifest) {
        for ((name, hash) in manifest.files) {
            Storage.safeRelative(name) ?: throw wrong("files", "a path inside the artifact's folder", name)
            if (!HEX.matches(hash)) throw wrong("files.$name", "SHA-256 as 64 hexadecimal digits", hash)
        }
        for (name in listOf(manifest.program, Artifact.TOKENIZER_FILE)) {
            Storage.safeRelative(name) ?: throw wrong("program", "a path inside the artifact's folder", name)
            if (name !in manifest.files) throw wrong("files", "a SHA-256 of $name", "no entry for it")
        }
    }

    private fun method(manifest: Manifest, name: String): ProgramMethod =
        manifest.methods[name] ?: throw wrong("methods", "a method $name", manifest.methods.keys.joinToString(", "))

    private fun inputs(manifest: Manifest, name: String, rows: Int, length: Int) {
        val where = "methods.$name.inputs"
        val ports = method(manifest, name).inputs
        port(ports, where, "ids", DType.INT64, listOf(rows, length))
        port(ports, where, "labels", DType.INT64, listOf(rows, length))
        port(ports, where, "adapter", DType.FLOAT32, listOf(manifest.adapterSize))
        val unknown = ports.filter { it.name !in Session.INPUTS }
        if (unknown.isNotEmpty()) {
            throw wrong(where, "only inputs that the app can give: ${Session.INPUTS.joinToString(", ")}", unknown.first())
        }
    }

    private fun stepOutputs(manifest: Manifest, name: String) {
        val ports = method(manifest, name).outputs
        port(ports, "methods.$name.outputs", "losses", DType.FLOAT32, listOf(manifest.method.copies))
        port(ports, "methods.$name.outputs", "projected_gradients", DType.FLOAT32, listOf(manifest.method.queries))
        port(ports, "methods.$name.outputs", "adapter", DType.FLOAT32, listOf(manifest.adapterSize))
    }

    private fun evaluateOutputs(manifest: Manifest, name: String) {
        val ports = method(manifest, name).outputs
        port(ports, "methods.$name.outputs", "nll_sum", DType.FLOAT32, listOf(manifest.evalBatchSize))
        port(ports, "methods.$name.outputs", "tokens", DType.FLOAT32, listOf(manifest.evalBatchSize))
    }

    private fun port(ports: List<Port>, where: String, name: String, dtype: DType, shape: List<Int>) {
        val port = ports.firstOrNull { it.name == name } ?: throw wrong(where, "a tensor '$name'", ports.joinToString("; "))
        if (port.dtype != dtype || port.shape != shape) {
            throw wrong("$where.$name", "${dtype.manifestName} $shape", port)
        }
    }

    private fun wrong(field: String, expected: String, received: Any) =
        artifactError("${ManifestReader.FILE_NAME}: field '$field'", expected, received, HINT)
}
