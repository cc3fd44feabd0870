package org.ondevice.core

/**
 * What one training step came to.
 *
 * @property loss mean of [losses], nats per labelled token, in float32 as the Python side takes it.
 * @property losses one for each perturbed copy.
 * @property projectedGradients one for each random direction, nats per unit of perturbation.
 */
class StepResult(val loss: Double, val losses: FloatArray, val projectedGradients: FloatArray)

/** Summed negative log likelihood (nats) and labelled tokens of each row of a batch. */
class RowLosses(val nll: FloatArray, val tokens: LongArray)

/**
 * Runs an artifact's program. It holds the flat adapter vector, which goes into every call and comes out of a
 * training step; the program keeps nothing.
 *
 * One thread at a time.
 */
class Session(val manifest: Manifest, val program: Program) {
    /** The adapter, float32 [adapterSize]; zeros until trained or loaded. A step replaces the array. */
    var adapter: FloatArray = FloatArray(manifest.adapterSize)
        private set

    /** Keys the noise. */
    var seed: Long = manifest.generator.seed
        private set

    val backend: String get() = "executorch"

    /** Take another adapter vector, and the seed it was trained with. */
    fun load(flat: FloatArray, seed: Long = this.seed) {
        if (flat.size != manifest.adapterSize) {
            throw OndeviceException(
                ErrorKind.CHECKPOINT, "the adapter is not of this program",
                "float32 [${manifest.adapterSize}]", "float32 [${flat.size}]", "use an adapter that this artifact made",
            )
        }
        adapter = flat.copyOf()
        this.seed = seed
    }

    /** One whole training step; [step] counts from 0 and picks the noise. */
    fun step(batch: Batch, step: Int, learningRate: Double): StepResult {
        val name = method("train_step", manifest.batchSize, batch)
        val rows = if (manifest.oneMethod) batch.repeated(manifest.method.copies) else batch
        val outputs = run(name, values(rows, step, learningRate, manifest.method.perturbationScale))
        val losses = outputs.getValue("losses").floats()
        adapter = outputs.getValue("adapter").floats()
        return StepResult(mean(losses).toDouble(), losses, outputs.getValue("projected_gradients").floats())
    }

    /** Losses of the rows of a batch of [Manifest.evalBatchSize] rows, with this session's adapter or [flat]. */
    fun evaluate(batch: Batch, flat: FloatArray = adapter): RowLosses {
        val name = method(if (manifest.oneMethod) "train_step" else "evaluate", manifest.evalBatchSize, batch)
        val outputs = run(name, values(batch, 0, 0.0, 0.0) + ("adapter" to vector(flat)))
        val tokens = outputs.getValue("tokens").floats()
        return RowLosses(outputs.getValue("nll_sum").floats(), LongArray(tokens.size) { tokens[it].toLong() })
    }

    /** Whether the program can say which token comes next. */
    val generates: Boolean get() = NEXT_TOKEN in manifest.methods

    /** Logits [vocabulary] of the token behind the first [length] of [ids]; only where [generates]. */
    fun nextToken(ids: LongArray, length: Int, flat: FloatArray = adapter): FloatArray {
        val given = mapOf(
            "ids" to Tensor.of(ids, 1, ids.size.toLong()),
            "length" to Tensor.of(longArrayOf(length.toLong()), 1),
            "adapter" to vector(flat),
        )
        return run(NEXT_TOKEN, given).getValue("logits").floats()
    }

    private fun method(kind: String, rows: Int, batch: Batch): String {
        if (batch.rows != rows) throw artifactError("the program's $kind takes $rows rows", rows, batch.rows)
        return manifest.methodFor(kind, batch.lengthTokens)
    }

    private fun values(batch: Batch, step: Int, learningRate: Double, scale: Double): Map<String, Tensor> = mapOf(
        "ids" to Tensor.of(batch.ids, batch.rows.toLong(), batch.lengthTokens.toLong()),
        "labels" to Tensor.of(batch.labels, batch.rows.toLong(), batch.lengthTokens.toLong()),
        "adapter" to vector(adapter),
        "seed" to Tensor.of(longArrayOf(seed), 1),
        "step" to Tensor.of(longArrayOf(step.toLong()), 1),
        "learning_rate" to Tensor.of(floatArrayOf(learningRate.toFloat()), 1),
        "perturbation_scale" to Tensor.of(floatArrayOf(scale.toFloat()), 1),
    )

    private fun vector(flat: FloatArray) = Tensor.of(flat, flat.size.toLong())

    private fun run(name: String, given: Map<String, Tensor>): Map<String, Tensor> {
        val method = manifest.methods[name] ?: throw artifactError("the program has no method $name", received = manifest.methods.keys)
        val outputs = program.execute(name, method.inputs.map { given.getValue(it.name) })
        if (outputs.size != method.outputs.size) {
            throw artifactError("$name gave another number of tensors", method.outputs.size, outputs.size, "export the artifact again")
        }
        return method.outputs.zip(outputs).associate { (port, tensor) ->
            if (tensor.dtype != port.dtype || tensor.count != port.shape.fold(1) { product, length -> product * length }) {
                throw artifactError("$name gave another tensor than the manifest says", port, tensor, "export the artifact again")
            }
            port.name to tensor
        }
    }

    companion object {
        const val NEXT_TOKEN = "next_token"
        internal val INPUTS = setOf("ids", "labels", "adapter", "seed", "step", "learning_rate", "perturbation_scale")

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
