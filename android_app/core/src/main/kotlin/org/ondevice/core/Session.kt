package org.ondevice.core

/**
 * What one training step came to.
 *
 * @property loss mean of [losses], nats per labelled token, in float32 as the Python side takes it.
 * @property losses one for each forward copy; one number for a first-order step.
 * @property projectedGradients one for each random direction, nats per unit of perturbation; empty for a first-order step.
 */
class StepResult(val loss: Double, val losses: FloatArray, val projectedGradients: FloatArray)

/** Summed negative log likelihood (nats) and labelled tokens of each row of a batch. */
class RowLosses(val nll: FloatArray, val tokens: LongArray)

/**
 * Runs an artifact's program and knows no training method: [ProgramSpec] says what goes in and comes out by role, and
 * what is kept from step to step. The state goes into every call and comes out of a training step; the program keeps
 * nothing.
 *
 * One thread at a time.
 */
class Session(val artifact: Artifact, val program: Program) {
    val manifest: Manifest get() = artifact.manifest
    private val spec = manifest.spec
    private val state = LinkedHashMap<String, Tensor>()
    private val updates = LinkedHashMap<String, Long>()

    /** Keys the noise. */
    var seed: Long = manifest.generator.seed
        private set

    val backend: String get() = "executorch"

    val generatorBackend: String get() = manifest.generator.lowering.let { if (it == "none") it else "$backend-$it" }

    /** The adapter, float32 [[ProgramSpec.adapterSize]]. A step replaces the array. */
    val adapter: FloatArray get() = state.getValue(spec.adapter.name).floats()

    init {
        restart()
    }

    /** Go back to the state that a run starts from, with [adapter] for the artifact's own if it is given. */
    fun restart(adapter: FloatArray? = null) {
        if (adapter != null && adapter.size != spec.adapterSize) {
            throw OndeviceException(
                ErrorKind.CHECKPOINT, "the adapter is not of this program",
                "float32 [${spec.adapterSize}]", "float32 [${adapter.size}]", "use an adapter that this artifact made",
            )
        }
        seed = manifest.generator.seed
        for (counter in spec.counters) if (counter.countsUpdates) updates[counter.name] = 0
        for (tensor in spec.state) state[tensor.name] = artifact.first(tensor)
        if (adapter != null) state[spec.adapter.name] = vector(adapter.copyOf())
    }

    /** Every tensor of the state, the seed, and how often the optimizer has updated: what a checkpoint holds. */
    fun state(): Map<String, StoredTensor> =
        spec.state.associate { it.name to StoredTensor.of(state.getValue(it.name), it.shape) } +
            (updates + ("seed" to seed)).mapValues { StoredTensor(listOf(1), longArrayOf(it.value)) }

    /**
     * Take back what [state] gave.
     *
     * @throws OndeviceException [ErrorKind.CHECKPOINT]: a tensor is missing or of another dtype or shape; nothing has changed.
     */
    fun load(stored: Map<String, StoredTensor>) {
        val wanted = spec.state.map { Triple(it.name, it.dtype, it.shape) } + (updates.keys + "seed").map { Triple(it, DType.INT64, listOf(1)) }
        for ((name, dtype, shape) in wanted) {
            val found = stored[name]
            if (found == null || found.tensor().dtype != dtype || found.shape != shape) {
                throw OndeviceException(
                    ErrorKind.CHECKPOINT, "the checkpoint is not of this program: $name", "${dtype.manifestName} $shape",
                    found?.tensor()?.toString() ?: "missing", "start the run again",
                )
            }
        }
        for (tensor in spec.state) state[tensor.name] = stored.getValue(tensor.name).tensor()
        for (name in updates.keys) updates[name] = stored.getValue(name).longs!![0]
        seed = stored.getValue("seed").longs!![0]
    }

    /** One whole training step; [step] counts from 0 and picks the noise. */
    fun step(batch: Batch, step: Int, learningRate: Double): StepResult {
        val name = method("train_step", manifest.batchSize, batch)
        val outputs = run(name, tokens(batch.repeated(spec.batchCopies)) + scalars(step, learningRate) { it.train })
        for ((key, tensor) in outputs) if (key.role == Role.STATE) state[key.name] = tensor
        for (counter in updates.keys) updates[counter] = updates.getValue(counter) + 1
        val losses = outputs.getValue(Key(Role.LOSSES)).floats()
        val gradients = outputs[Key(Role.PROJECTED_GRADIENTS)]?.floats() ?: FloatArray(0)
        return StepResult(mean(losses).toDouble(), losses, gradients)
    }

    /** Losses of the rows of a batch of [Manifest.evalBatchSize] rows, with this session's adapter or [flat]. */
    fun evaluate(batch: Batch, flat: FloatArray = adapter): RowLosses {
        val name = method(spec.evaluatesWith, manifest.evalBatchSize, batch)
        val outputs = run(name, tokens(batch) + scalars(0, 0.0) { it.evaluate }, flat)
        val tokens = outputs.getValue(Key(Role.TOKENS)).floats()
        return RowLosses(outputs.getValue(Key(Role.NLL_SUM)).floats(), LongArray(tokens.size) { tokens[it].toLong() })
    }

    /** Whether the program can say which token comes next. */
    val generates: Boolean get() = NEXT_TOKEN in spec.methods

    /** Logits [vocabulary] of the token behind the first [length] of [ids]; only where [generates]. */
    fun nextToken(ids: LongArray, length: Int, flat: FloatArray = adapter): FloatArray {
        val given = mapOf(Key(Role.IDS) to Tensor.of(ids, 1, ids.size.toLong()), Key(Role.LENGTH) to scalar(length.toLong()))
        return run(NEXT_TOKEN, given, flat).getValue(Key(Role.LOGITS)).floats()
    }

    private fun method(kind: String, rows: Int, batch: Batch): String {
        if (batch.rows != rows) throw artifactError("the program's $kind takes $rows rows", rows, batch.rows)
        return manifest.methodFor(kind, batch.lengthTokens)
    }

    /** What a port is bound by: its role, and its name where a method may have several of that role. */
    private data class Key(val role: Role, val name: String = "")

    private fun key(port: Port) = Key(port.role, if (port.role.isNamed) port.name else "")

    private fun tokens(batch: Batch): Map<Key, Tensor> = mapOf(
        Key(Role.IDS) to Tensor.of(batch.ids, batch.rows.toLong(), batch.lengthTokens.toLong()),
        Key(Role.LABELS) to Tensor.of(batch.labels, batch.rows.toLong(), batch.lengthTokens.toLong()),
    )

    private fun scalars(step: Int, learningRate: Double, constant: (Constant) -> Double): Map<Key, Tensor> =
        mapOf(Key(Role.SEED) to scalar(seed), Key(Role.LEARNING_RATE) to scalar(learningRate)) +
            spec.counters.associate { Key(Role.COUNTER, it.name) to scalar(updates[it.name] ?: step.toLong()) } +
            spec.constants.associate { Key(Role.CONSTANT, it.name) to scalar(constant(it)) }

    private fun scalar(value: Long) = Tensor.of(longArrayOf(value), 1)

    private fun scalar(value: Double) = Tensor.of(floatArrayOf(value.toFloat()), 1)

    private fun vector(flat: FloatArray) = Tensor.of(flat, flat.size.toLong())

    /** Run a method on [given] and the state, with the adapter [flat]; its outputs by role. */
    private fun run(name: String, given: Map<Key, Tensor>, flat: FloatArray = adapter): Map<Key, Tensor> {
        val method = spec.methods[name] ?: throw artifactError("the program has no method $name", received = spec.methods.keys)
        val all = given + (state + (spec.adapter.name to vector(flat))).mapKeys { Key(Role.STATE, it.key) }
        val outputs = program.execute(name, method.inputs.map { all.getValue(key(it)) })
        if (outputs.size != method.outputs.size) {
            throw artifactError("$name gave another number of tensors", method.outputs.size, outputs.size, "export the artifact again")
        }
        return method.outputs.zip(outputs).associate { (port, tensor) ->
            if (tensor.dtype != port.dtype || tensor.count != port.shape.fold(1) { product, length -> product * length }) {
                throw artifactError("$name gave another tensor than the manifest says", port, tensor, "export the artifact again")
            }
            key(port) to tensor
        }
    }

    companion object {
        const val NEXT_TOKEN = "next_token"

        /** The mean as numpy takes it: float32 sums, in eight lanes from eight elements on (up to 128). */
        internal fun mean(values: FloatArray): Float = sum(values, 0, values.size) / values.size

        private fun sum(values: FloatArray, from: Int, count: Int): Float {
            if (count < 8) {
                var total = -0.0f
                for (index in from until from + count) total += values[index]
                return total
            }
            if (count > 128) {
                val half = (count / 2) - (count / 2) % 8
                return sum(values, from, half) + sum(values, from + half, count - half)
            }
            val lanes = FloatArray(8) { values[from + it] }
            var index = 8
            while (index < count - count % 8) {
                for (lane in 0 until 8) lanes[lane] += values[from + index + lane]
                index += 8
            }
            var total = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]))
            while (index < count) total += values[from + index++]
            return total
        }
    }
}
