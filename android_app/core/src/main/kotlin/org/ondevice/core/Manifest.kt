package org.ondevice.core

/** What a port is for; a session binds inputs and takes outputs by it. */
enum class Role(val manifestName: String) {
    IDS("ids"), LABELS("labels"), STATE("state"), COUNTER("counter"), SEED("seed"), LEARNING_RATE("learning_rate"),
    CONSTANT("constant"), PROJECTED_GRADIENTS("projected_gradients"), LENGTH("length"), LOSSES("losses"),
    NLL_SUM("nll_sum"), TOKENS("tokens"), LOGITS("logits"), SUM("sum"), FROZEN("frozen"), HIDDEN("hidden"),
    GRADIENT("gradient"), TARGETS("targets"), TOKEN_SCALE("token_scale"), TILE_FIRST("tile_first"), TILE_SKIP("tile_skip"),
    TILE_SUMS("tile_sums"), POSITION("position"), KEYS("keys"), VALUES("values"), LOSS_SCALE("loss_scale"),
    LAYER_INPUT("layer_input"), SHARED_KEYS("shared_keys"), SHARED_VALUES("shared_values"), KEYS_GRADIENT("keys_gradient"),
    VALUES_GRADIENT("values_gradient");

    /** True for what blocks of a step hand to each other besides hidden states: the host keeps it by role and name. */
    val isShared: Boolean get() = this == SHARED_KEYS || this == SHARED_VALUES || isSum

    /** True for sums of gradients, which begin as zeros. */
    val isSum: Boolean get() = this == KEYS_GRADIENT || this == VALUES_GRADIENT

    /** True where a method may have several ports of this role, told apart by name. */
    val isNamed: Boolean get() = this == STATE || this == COUNTER || this == CONSTANT || this == TILE_SUMS || this == FROZEN || isShared
}

/** One input or output of a program method: a dense tensor of [shape]. */
data class Port(val name: String, val role: Role, val dtype: DType, val shape: List<Int>, val unit: String = "") {
    /** Elements. */
    val count: Int get() = shape.fold(1) { product, length -> product * length }

    fun lengths(): LongArray = LongArray(shape.size) { shape[it].toLong() }

    override fun toString(): String = "$name (${role.manifestName}) ${dtype.manifestName} $shape"
}

/**
 * One method of the program.
 *
 * @property plannedBytes memory that the runtime plans for intermediate tensors, without what delegates take.
 * @property ops kernels that the runtime must have.
 * @property program the file with the method, where every layer has its own, `{layer}` for its number; null where it is in
 *   the artifact's one program.
 */
data class ProgramMethod(
    val inputs: List<Port>,
    val outputs: List<Port>,
    val plannedBytes: Long,
    val ops: List<String>,
    val delegates: Int,
    val instructions: Int,
    val program: String? = null,
)

/**
 * A tensor that a training step changes.
 *
 * @property first a safetensors file of the artifact that holds the value a run starts from; null for zeros.
 */
data class StateTensor(val name: String, val dtype: DType, val shape: List<Int>, val isAdapter: Boolean, val first: String?)

/** An int64 [1] input: the run's step number, or the updates of the optimizer so far, which are a part of the state. */
data class Counter(val name: String, val countsUpdates: Boolean)

/** A float32 [1] input with one value in training and one in evaluation. */
data class Constant(val name: String, val train: Double, val evaluate: Double)

/**
 * The LoRA matrices of one linear layer in the flat adapter vector: B float32 [rank, outputs] at [offset] elements and
 * A float32 [rank, inputs] at [aOffset], both row-major. Where [aOffset] is null A is frozen and lies in
 * [ProgramSpec.frozen].
 */
data class AdapterEntry(
    val linear: String,
    val layer: Int,
    val target: String,
    val offset: Int,
    val rank: Int,
    val inputs: Int,
    val outputs: Int,
    val aOffset: Int?,
) {
    val count: Int get() = rank * outputs
    val aName: String get() = "$linear.lora_A.weight"
    val bName: String get() = "$linear.lora_B.weight"
}

/**
 * A program whose methods are functions of one block: the host calls them once a layer (develop/block-programs.md).
 *
 * @property layers how often; `{layer}` in a frozen port's name stands for the number, and each state tensor is as many
 *   equal ranges.
 * @property weights the safetensors file of the frozen weights, each aligned to 64 bytes.
 * @property vocab rows of the head, which its functions take tile by tile.
 * @property kinds of each layer, the kind of its block, where they differ; empty where all are of one.
 * @property lossScale what the gradient of the loss is multiplied by in a run's first step, where blocks compute in
 *   float16; null where nothing is scaled.
 */
data class BlocksInfo(val layers: Int, val weights: String, val vocab: Int, val kinds: List<Int> = emptyList(), val lossScale: Double? = null) {
    /** The layers whose block has the method of that name: only these have its frozen ports. All have an input of their own. */
    fun layersOf(method: String): List<Int> {
        if (method.startsWith(BlockSteps.LAYER_INPUT)) return (0 until layers).toList()
        val kind = method.substringAfterLast('_', "").toIntOrNull() ?: 0
        return (0 until layers).filter { kinds.isEmpty() || kinds[it] == kind }
    }

    /** The end of the name of a function of that layer's block. */
    fun endOfName(layer: Int): String = kinds.getOrElse(layer) { 0 }.let { if (it == 0) "" else "_$it" }
}

/**
 * The program's methods and its state: all that a session needs to run it without knowing the training method.
 *
 * @property blocks null where one method is a whole training step.
 * @property methods of a whole step, `train_step` and `evaluate` are for the longest length; `<name>_<tokens>` for the
 *   others.
 * @property batchCopies how often `train_step` takes a training batch, copy after copy; an evaluation hands in other
 *   rows instead.
 * @property evaluatesWith the method whose `nll_sum` and `tokens` are an evaluation's: `evaluate` or `train_step`.
 * @property frozen a safetensors file with the A of every entry without [AdapterEntry.aOffset].
 * @property adapterSize elements of the flat adapter vector, padding included.
 */
data class ProgramSpec(
    val blocks: BlocksInfo?,
    val methods: Map<String, ProgramMethod>,
    val state: List<StateTensor>,
    val counters: List<Counter>,
    val constants: List<Constant>,
    val batchCopies: Int,
    val evaluatesWith: String,
    val frozen: String?,
    val layout: List<AdapterEntry>,
    val adapterSize: Int,
    val rank: Int,
    val alpha: Double,
) {
    /** The state tensor that is the adapter; [ManifestCheck] has seen that there is one. */
    val adapter: StateTensor get() = state.single { it.isAdapter }

    /** True where the program can say which token comes next. */
    val generates: Boolean get() = (if (blocks == null) WholeSteps.NEXT_TOKEN else BlockSteps.HEAD_LOGITS) in methods

    /** Programs of the layers, where each has its own. */
    val layerPrograms: List<String>
        get() = methods.values.mapNotNull { it.program }.distinct().flatMap { name -> (0 until (blocks?.layers ?: 0)).map { BlockSteps.ofLayer(name, it) } }

    /** Files that a session needs beside the program: the state's first values, the frozen A, the weights, the layers' programs. */
    val files: List<String> get() = (state.map { it.first } + frozen + blocks?.weights + layerPrograms).filterNotNull().distinct()
}

/** What of a method runs on which backend; [bytes] are the weights and constants of that part. */
data class PartitionPart(val backend: String, val operators: Int, val bytes: Long)

/** The noise: scheme, distribution, lowering (`none` without noise) and seed. */
data class GeneratorInfo(val scheme: String, val distribution: String, val lowering: String, val seed: Long)

/** The training method as the screens and the log show it; [values] has all its settings. */
data class MethodInfo(val name: String, val learningRate: Double, val values: Map<String, Any?>)

/**
 * `manifest.json` of an artifact (schema version 2), checked: see [ManifestReader].
 *
 * @property sha256 of the manifest file itself; a checkpoint remembers it.
 * @property program path of the program's file inside the artifact; [spec] says what is in it.
 * @property lengthsTokens padded lengths that the program has methods for, ascending.
 * @property files SHA-256 of every file by its path inside the artifact.
 * @property soc the Qualcomm chip that the NPU's part was compiled for; null for a program without one.
 * @property partition which backend runs how much, by method; empty where the exporter did not say.
 */
data class Manifest(
    val sha256: String,
    val ondeviceVersion: String,
    val runtime: String,
    val target: String,
    val method: MethodInfo,
    val modelSource: String,
    val modelSha256: String,
    val modelDims: Map<String, Any?>,
    val program: String,
    val spec: ProgramSpec,
    val quantize: String,
    val lengthsTokens: List<Int>,
    val batchSize: Int,
    val evalBatchSize: Int,
    val generator: GeneratorInfo,
    val customOps: List<String>,
    val soc: String?,
    val tokenizerSha256: String,
    val chatTemplateSha256: String?,
    val task: String?,
    val files: Map<String, String>,
    val partition: Map<String, List<PartitionPart>>,
) {
    val longestTokens: Int get() = lengthsTokens.last()

    /** Highest planned memory of any method, in bytes. */
    val plannedBytes: Long get() = spec.methods.values.maxOf { it.plannedBytes }

    /** Bytes of the adapter vector. */
    val adapterBytes: Long get() = 4L * spec.adapterSize

    /** True where a program of its own answers, with packed weights. */
    val hasPackedAnswers: Boolean get() = AnswersInfo.FILE_NAME in files && AnswersInfo.PROGRAM_NAME in files

    /** True where something can write text. */
    val writes: Boolean get() = hasPackedAnswers || spec.generates

    /** Name of the method [kind] (`train_step` or `evaluate`) for rows padded to [lengthTokens]. */
    fun methodFor(kind: String, lengthTokens: Int): String {
        if (lengthTokens !in lengthsTokens) {
            throw artifactError("the program has no method for $lengthTokens tokens", "a length among $lengthsTokens", lengthTokens)
        }
        return if (lengthTokens == longestTokens) kind else "${kind}_$lengthTokens"
    }

    /** The method in which most of a training step is spent. */
    val stepMethod: String
        get() = if (spec.blocks == null) methodFor(WholeSteps.TRAIN_STEP, longestTokens) else BlockSteps.BACKWARD + BlockSteps.sizeOf(batchSize, longestTokens)

    /** The smallest length that holds [tokens], or null when none does. */
    fun lengthFor(tokens: Int): Int? = lengthsTokens.firstOrNull { it >= tokens }

    /**
     * Refuse a program that needs kernels which the app's runtime does not link. ExecuTorch itself would only
     * say error 0x14 (OperatorMissing).
     *
     * @param linked this project's own ops that the app links; empty for the stock AAR.
     */
    fun requireOps(linked: Set<String> = emptySet()) {
        val missing = customOps.filter { it !in linked }
        if (missing.isNotEmpty()) {
            throw artifactError(
                "the app's runtime lacks ops that the program needs: ${missing.joinToString(", ")}",
                "only ops of the stock runtime" + if (linked.isEmpty()) "" else " and ${linked.sorted().joinToString(", ")}",
                missing.joinToString(", "),
                "export it with --set export.generator=aten and --quantize none, or build the app with these ops",
            )
        }
    }
}
