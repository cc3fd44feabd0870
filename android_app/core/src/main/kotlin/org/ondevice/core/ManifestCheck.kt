package org.ondevice.core

/** What must agree inside one manifest, so that a wrong one is refused before a program is loaded. */
internal object ManifestCheck {
    private const val HINT = "export the model again"
    private val HEX = Regex("[0-9a-f]{64}")
    private val ONE = listOf(1)

    fun check(manifest: Manifest) {
        state(manifest.spec)
        layout(manifest.spec)
        if (manifest.spec.blocks == null) methods(manifest) else BlocksCheck.check(manifest)
        names(manifest)
    }

    /** One of the state tensors is the adapter. */
    private fun state(spec: ProgramSpec) {
        val adapters = spec.state.filter { it.isAdapter }
        val good = adapters.singleOrNull()?.let { it.dtype == DType.FLOAT32 && it.shape == listOf(spec.adapterSize) } ?: false
        if (!good) throw wrong("program_spec.state", "one adapter, float32 [${spec.adapterSize}]", adapters.ifEmpty { "none" })
    }

    /** The matrices lie inside the adapter vector, apart; those that do not have a file. */
    private fun layout(spec: ProgramSpec) {
        if (spec.layout.isEmpty()) throw wrong("program_spec.layout", "at least one matrix", "none")
        if (spec.frozen == null && spec.layout.any { it.aOffset == null }) {
            throw wrong("program_spec.frozen", "a file with the A of every layer without a_offset", "null")
        }
        val ranges = spec.layout.flatMapIndexed { index, entry ->
            val name = "program_spec.layout.$index (${entry.linear})"
            listOfNotNull(
                Range(name, entry.offset, entry.rank.toLong() * entry.outputs),
                entry.aOffset?.let { Range(name, it, entry.rank.toLong() * entry.inputs) },
            )
        }
        var end = 0L
        for (range in ranges.sortedBy { it.first }) {
            if (range.first < end || range.first + range.count > spec.adapterSize) {
                throw wrong(
                    range.name, "a range behind element $end and inside ${spec.adapterSize} elements", "${range.count} elements at ${range.first}",
                )
            }
            end = range.first + range.count
        }
    }

    private class Range(val name: String, val first: Int, val count: Long)

    /** Every length has its training step and its evaluation, with ports that the session can bind. */
    private fun methods(manifest: Manifest) {
        val spec = manifest.spec
        val trainRows = spec.batchCopies * manifest.batchSize
        if (spec.evaluatesWith == TRAIN && manifest.evalBatchSize != trainRows) {
            throw wrong("eval_batch_size", "${spec.batchCopies} copies of ${manifest.batchSize} rows", manifest.evalBatchSize)
        }
        if (manifest.lengthsTokens.isEmpty()) throw wrong("lengths_tokens", "at least one length", "none")
        spec.methods.entries.firstOrNull { it.value.program != null }?.let { (name, method) ->
            throw wrong("program_spec.methods.$name.program", "null in a program of whole steps", method.program!!)
        }
        for (length in manifest.lengthsTokens) {
            val train = manifest.methodFor(TRAIN, length)
            inputs(spec, train, trainRows, length)
            outputs(spec, train, Role.LOSSES, null)
            // A tensor of the state that does not go in and come out would never change.
            for (tensor in spec.state) {
                for ((where, ports) in listOf("inputs" to method(spec, train).inputs, "outputs" to method(spec, train).outputs)) {
                    if (ports.none { it.role == Role.STATE && it.name == tensor.name }) {
                        throw wrong("program_spec.methods.$train.$where", "the state '${tensor.name}'", ports.joinToString("; "))
                    }
                }
            }
            val evaluate = manifest.methodFor(spec.evaluatesWith, length)
            inputs(spec, evaluate, manifest.evalBatchSize, length)
            for (role in listOf(Role.NLL_SUM, Role.TOKENS)) outputs(spec, evaluate, role, manifest.evalBatchSize)
        }
        if (WholeSteps.NEXT_TOKEN in spec.methods) {
            inputs(spec, WholeSteps.NEXT_TOKEN, 1, manifest.longestTokens, labels = false)
            outputs(spec, WholeSteps.NEXT_TOKEN, Role.LOGITS, null)
        }
    }

    /** Every listed file stays inside the folder; the program, the tokenizer and the state's first values are among them. */
    private fun names(manifest: Manifest) {
        for ((name, hash) in manifest.files) {
            Storage.safeRelative(name) ?: throw wrong("files", "a path inside the artifact's folder", name)
            if (!HEX.matches(hash)) throw wrong("files.$name", "SHA-256 as 64 hexadecimal digits", hash)
        }
        for (name in listOf(manifest.program, Artifact.TOKENIZER_FILE) + manifest.spec.files) {
            Storage.safeRelative(name) ?: throw wrong("program", "a path inside the artifact's folder", name)
            if (name !in manifest.files) throw wrong("files", "a SHA-256 of $name", "no entry for it")
        }
    }

    internal fun method(spec: ProgramSpec, name: String): ProgramMethod =
        spec.methods[name] ?: throw wrong("program_spec.methods", "a method $name", spec.methods.keys.joinToString(", "))

    private fun inputs(spec: ProgramSpec, name: String, rows: Int, length: Int, labels: Boolean = true) {
        val where = "program_spec.methods.$name.inputs"
        val ports = method(spec, name).inputs
        for (port in ports) {
            val expected = when (port.role) {
                Role.IDS, Role.LABELS -> DType.INT64 to listOf(rows, length)
                Role.STATE -> spec.state.firstOrNull { it.name == port.name }?.let { it.dtype to it.shape }
                Role.COUNTER -> if (spec.counters.any { it.name == port.name }) DType.INT64 to ONE else null
                Role.CONSTANT -> if (spec.constants.any { it.name == port.name }) DType.FLOAT32 to ONE else null
                Role.SEED -> DType.INT64 to ONE
                Role.LEARNING_RATE -> DType.FLOAT32 to ONE
                Role.LENGTH -> if (labels) null else DType.INT64 to ONE
                else -> null
            } ?: throw wrong(where, "only inputs that the app can give, each state, counter and constant by its name", port)
            if (port.dtype to port.shape != expected) throw wrong("$where.${port.name}", "${expected.first.manifestName} ${expected.second}", port)
        }
        for (role in if (labels) listOf(Role.IDS, Role.LABELS) else listOf(Role.IDS, Role.LENGTH)) {
            if (ports.count { it.role == role } != 1) throw wrong(where, "one port of role ${role.manifestName}", ports.joinToString("; "))
        }
    }

    /** The method has one output of this role: float32, as many as [count] if that is given. State comes out as it goes in. */
    private fun outputs(spec: ProgramSpec, name: String, role: Role, count: Int?) {
        val where = "program_spec.methods.$name.outputs"
        val ports = method(spec, name).outputs
        val port = ports.singleOrNull { it.role == role } ?: throw wrong(where, "one port of role ${role.manifestName}", ports.joinToString("; "))
        if (port.dtype != DType.FLOAT32 || port.shape.size != 1 || (count != null && port.shape[0] != count)) {
            throw wrong("$where.${port.name}", "float32 [${count ?: "any"}]", port)
        }
        for (one in ports.filter { it.role == Role.STATE }) {
            if (spec.state.none { it.name == one.name && it.dtype == one.dtype && it.shape == one.shape }) {
                throw wrong("$where.${one.name}", "a tensor of the state", one)
            }
        }
    }

    private const val TRAIN = WholeSteps.TRAIN_STEP

    internal fun wrong(field: String, expected: String, received: Any) =
        artifactError("${ManifestReader.FILE_NAME}: field '$field'", expected, received, HINT)
}
