package org.ondevice.core

/** One input or output of a program method: a dense tensor of [shape]. */
data class Port(val name: String, val dtype: DType, val shape: List<Int>, val unit: String) {
    override fun toString(): String = "$name ${dtype.manifestName} $shape"
}

/**
 * One method of the program.
 *
 * @property plannedBytes memory that the runtime plans for intermediate tensors, without what delegates take.
 * @property ops kernels that the runtime must have.
 */
data class ProgramMethod(
    val inputs: List<Port>,
    val outputs: List<Port>,
    val plannedBytes: Long,
    val ops: List<String>,
    val delegates: Int,
    val instructions: Int,
)

/** One LoRA B matrix in the flat adapter vector: float32 [rank, outputs], row-major, at [offset] elements. */
data class AdapterEntry(
    val linear: String,
    val layer: Int,
    val target: String,
    val offset: Int,
    val rank: Int,
    val inputs: Int,
    val outputs: Int,
) {
    val count: Int get() = rank * outputs
}

/** What of a method runs on which backend; [bytes] are the weights and constants of that part. */
data class PartitionPart(val backend: String, val operators: Int, val bytes: Long)

/** The noise: scheme, distribution, lowering and seed; the seed also drew the frozen A. */
data class GeneratorInfo(val scheme: String, val distribution: String, val lowering: String, val seed: Long)

/**
 * The training method's settings that the phone needs; [values] has them all.
 *
 * @property copies perturbed copies of B in a step: 2q, or q + 1 for the one-sided estimator.
 */
data class MethodInfo(
    val name: String,
    val rank: Int,
    val alpha: Double,
    val targets: List<String>,
    val queries: Int,
    val copies: Int,
    val perturbationScale: Double,
    val learningRate: Double,
    val values: Map<String, Any?>,
)

/**
 * `manifest.json` of an artifact (schema version 1), checked: see [ManifestReader].
 *
 * @property sha256 of the manifest file itself; a checkpoint remembers it.
 * @property lengthsTokens padded lengths that the program has methods for, ascending.
 * @property adapterSize elements of the flat adapter vector, padding included.
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
    val form: String,
    val quantize: String,
    val methods: Map<String, ProgramMethod>,
    val lengthsTokens: List<Int>,
    val batchSize: Int,
    val evalBatchSize: Int,
    val generator: GeneratorInfo,
    val adapterSize: Int,
    val adapter: List<AdapterEntry>,
    val customOps: List<String>,
    val soc: String?,
    val tokenizerSha256: String,
    val chatTemplateSha256: String?,
    val task: String?,
    val files: Map<String, String>,
    val partition: Map<String, List<PartitionPart>>,
) {
    val longestTokens: Int get() = lengthsTokens.last()

    /**
     * Whether one method does all (an NPU program, which stores the model once): `train_step` takes
     * copies * [batchSize] rows and the perturbation scale. Training repeats the batch for every copy; an evaluation
     * hands in as many different rows and the scale 0.
     */
    val oneMethod: Boolean get() = "evaluate" !in methods && methods["train_step"]?.inputs?.any { it.name == "perturbation_scale" } == true

    /** Highest planned memory of any method, in bytes. */
    val plannedBytes: Long get() = methods.values.maxOf { it.plannedBytes }

    /** Bytes of the adapter vector: what a checkpoint holds. */
    val adapterBytes: Long get() = 4L * adapterSize

    /** Name of the method [kind] (`train_step` or `evaluate`) for rows padded to [lengthTokens]. */
    fun methodFor(kind: String, lengthTokens: Int): String {
        if (lengthTokens !in lengthsTokens) {
            throw artifactError("the program has no method for $lengthTokens tokens", "a length among $lengthsTokens", lengthTokens)
        }
        return if (lengthTokens == longestTokens) kind else "${kind}_$lengthTokens"
    }

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
