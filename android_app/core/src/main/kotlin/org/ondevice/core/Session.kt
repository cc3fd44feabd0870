package org.ondevice.core

/**
 * What one training step came to.
 *
 * @property loss mean of [losses], nats per labelled token, in float32 as the Python side takes it.
 * @property losses one for each forward copy; one number for a first-order step.
 * @property projectedGradients one for each random direction, nats per unit of perturbation; empty for a first-order step.
 * @property warning what a person should know of the step; null if nothing.
 * @property figures of preferences; null for other rows.
 */
class StepResult(
    val loss: Double, val losses: FloatArray, val projectedGradients: FloatArray, val warning: String? = null, val figures: Map<String, Double>? = null,
)

/** What an objective makes of a step's rows: its loss, the weight of each row's negative log likelihood, and figures. */
class Weighed(val loss: Double, val weights: DoubleArray, val figures: Map<String, Double>? = null)

/** Summed negative log likelihoods of a step's rows to what an objective makes of them. */
typealias Weigh = (FloatArray) -> Weighed

/** Summed negative log likelihood (nats) and labelled tokens of each row of a batch. */
class RowLosses(val nll: FloatArray, val tokens: LongArray)

/**
 * Runs an artifact's program and knows no training method: [ProgramSpec] says what goes in and comes out by role, and
 * what is kept from step to step. The state goes into every call and comes out of a training step; the program keeps
 * nothing. A step that fails has changed nothing.
 *
 * One thread at a time.
 */
class Session(val artifact: Artifact, val program: Program) {
    val manifest: Manifest get() = artifact.manifest
    private val spec = manifest.spec
    private val calls: ProgramCalls = if (spec.blocks == null) WholeSteps(manifest, program) else BlockSteps(artifact, program)
    private var state: State = emptyMap()
    private val updates = LinkedHashMap<String, Long>()

    /** What the gradient of the loss is multiplied by; null where nothing is scaled. */
    private var lossScale: Float? = null

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
        lossScale = spec.blocks?.lossScale?.toFloat()
        val first = spec.state.associate { it.name to artifact.first(it) }
        state = if (adapter == null) first else first + (spec.adapter.name to vector(adapter.copyOf()))
    }

    /** Every tensor of the state, the seed, how often the optimizer has updated, and the loss scale: what a checkpoint holds. */
    fun state(): Map<String, StoredTensor> =
        spec.state.associate { it.name to StoredTensor.of(state.getValue(it.name), it.shape) } +
            (updates + ("seed" to seed)).mapValues { StoredTensor(listOf(1), longArrayOf(it.value)) } +
            (lossScale?.let { mapOf(LOSS_SCALE to StoredTensor(listOf(1), floatArrayOf(it))) } ?: emptyMap())

    /**
     * Take back what [state] gave.
     *
     * @throws OndeviceException [ErrorKind.CHECKPOINT]: a tensor is missing or of another dtype or shape; nothing has changed.
     */
    fun load(stored: Map<String, StoredTensor>) {
        val wanted = spec.state.map { Triple(it.name, it.dtype, it.shape) } + (updates.keys + "seed").map { Triple(it, DType.INT64, listOf(1)) } +
            listOfNotNull(lossScale?.let { Triple(LOSS_SCALE, DType.FLOAT32, listOf(1)) })
        for ((name, dtype, shape) in wanted) {
            val found = stored[name]
            if (found == null || found.tensor().dtype != dtype || found.shape != shape) {
                throw OndeviceException(
                    ErrorKind.CHECKPOINT, "the checkpoint is not of this program: $name", "${dtype.manifestName} $shape",
                    found?.tensor()?.toString() ?: "missing", "start the run again",
                )
            }
        }
        state = spec.state.associate { it.name to stored.getValue(it.name).tensor() }
        for (name in updates.keys) updates[name] = stored.getValue(name).longs!![0]
        seed = stored.getValue("seed").longs!![0]
        if (lossScale != null) lossScale = stored.getValue(LOSS_SCALE).floats!![0]
    }

    /** One whole training step; [step] counts from 0 and picks the noise. */
    fun step(batch: Batch, step: Int, learningRate: Double): StepResult = step(batch, step.toLong(), learningRate)

    /**
     * The same on the sum of each row's weight times its negative log likelihood, if [weigh] is given: the gradient of every
     * loss whose derivatives the weights are.
     *
     * @throws OndeviceException [ErrorKind.ARTIFACT]: the program's steps are whole, and their rows cannot be weighed.
     */
    fun step(batch: Batch, step: Long, learningRate: Double, weigh: Weigh? = null): StepResult {
        val stepped = calls.step(state, batch, scalars(step, learningRate) { it.train }, weigh)
        if (stepped.state == null) {
            lossScale = lossScale!! / 2
            return stepped.result
        }
        state = stepped.state
        for (counter in updates.keys) updates[counter] = updates.getValue(counter) + 1
        return stepped.result
    }

    /** Losses of the rows of a batch of [Manifest.evalBatchSize] rows, with this session's adapter or [flat]. */
    fun evaluate(batch: Batch, flat: FloatArray = adapter): RowLosses =
        calls.evaluate(with(flat), batch, scalars(0L, 0.0) { it.evaluate })

    /** Whether the program can say which token comes next. */
    val generates: Boolean get() = spec.generates

    /** Columns of the ids that [nextToken] takes; only where [generates]. */
    val nextTokenColumns: Int get() = calls.nextTokenColumns

    /** A text that begins now, read with this session's adapter or [flat]; only where [generates]. */
    fun reader(padId: Int, flat: FloatArray = adapter): TokenReader = calls.reader(with(flat), padId)

    /** Logits [vocabulary] of the token behind the first [length] of [ids]; only where [generates]. */
    fun nextToken(ids: LongArray, length: Int, flat: FloatArray = adapter): FloatArray = calls.nextToken(with(flat), ids, length)

    private fun with(flat: FloatArray): State = state + (spec.adapter.name to vector(flat))

    private fun scalars(step: Long, learningRate: Double, constant: (Constant) -> Double): Map<Key, Tensor> =
        mapOf(Key(Role.SEED) to scalar(seed), Key(Role.LEARNING_RATE) to scalar(learningRate)) +
            (lossScale?.let { mapOf(Key(Role.LOSS_SCALE) to vector(floatArrayOf(it))) } ?: emptyMap()) +
            spec.counters.associate { Key(Role.COUNTER, it.name) to scalar(updates[it.name] ?: step) } +
            spec.constants.associate { Key(Role.CONSTANT, it.name) to scalar(constant(it)) }

    private companion object {
        /** Its name in a checkpoint. */
        const val LOSS_SCALE = "loss_scale"
    }
}
