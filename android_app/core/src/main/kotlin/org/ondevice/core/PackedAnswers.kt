package org.ondevice.core

import java.io.File

/** Where one linear layer's adapter lies in the vector that the program takes: Aᵀ [inputs, rank] at [a], and Bᵀ times alpha / rank, [rank, outputs], at [b]. */
internal class AnswersPair(val linear: String, val a: Int, val b: Int, val inputs: Int, val outputs: Int)

/**
 * What `answers.json` says of a program that answers with weights of its own, beside the training program.
 *
 * @property contextTokens most tokens of a conversation.
 * @property ops kernels that the runtime must have.
 */
class AnswersInfo internal constructor(
    val vocab: Int, val contextTokens: Int, val ops: List<String>,
    internal val chunkTokens: Int, internal val adapterSize: Int, internal val layout: List<AnswersPair>,
) {
    companion object {
        private const val FOLDER = "answers"
        const val FILE_NAME = "$FOLDER/answers.json"
        const val PROGRAM_NAME = "$FOLDER/model.pte"
        private const val FORMAT = 1L

        /**
         * Read the description in an artifact's folder.
         *
         * @throws OndeviceException [ErrorKind.ARTIFACT]: of another version, or for other adapters than [spec]'s.
         */
        internal fun read(folder: File, spec: ProgramSpec): AnswersInfo {
            val fields = Fields.parse(Storage.readText(File(folder, FILE_NAME)), FILE_NAME)
            if (fields.raw("format") != FORMAT) throw fields.wrong("format", "$FORMAT", fields.raw("format"))
            val layout = fields.objects("layout").map { AnswersPair(it.text("linear"), it.int("a"), it.int("b"), it.int("inputs"), it.int("outputs")) }
            val size = fields.int("adapter_size")
            val rank = spec.rank.toLong()
            // An adapter of which a part had no place would answer as less than it is.
            val fits = fields.raw("rank") == rank && layout.map { Triple(it.linear, it.inputs, it.outputs) }.toSet() == spec.layout.map { Triple(it.linear, it.inputs, it.outputs) }.toSet() &&
                layout.all { it.a + rank * it.inputs <= it.b && it.b + rank * it.outputs <= size }
            if (!fits) throw artifactError("$FILE_NAME: field 'layout'", "the ${spec.layout.size} layers of the manifest, rank $rank", "${layout.size} layers, rank ${fields.raw("rank")}", "export the model again")
            return AnswersInfo(fields.int("vocab", 1..Int.MAX_VALUE), fields.int("context_tokens", 1..Int.MAX_VALUE), fields.texts("ops"), fields.int("chunk_tokens", 1..Int.MAX_VALUE), size, layout)
        }
    }
}

/**
 * A program with packed weights that keeps keys and values itself; `exporters/executorch/packed.py` is the same in Python.
 *
 * It holds one conversation: a new reader forgets the one before.
 *
 * @param program opened on [AnswersInfo.PROGRAM_NAME].
 */
class PackedAnswers(private val artifact: Artifact, private val program: Program) {
    private val info = artifact.answers ?: throw artifactError("the artifact holds no program that answers", AnswersInfo.FILE_NAME, "no such file", "export it with export.answers=packed")
    private var latest: TokenReader? = null

    /** A text that begins now, read with the adapter [flat]. */
    fun reader(flat: FloatArray): TokenReader = Reader(vector(adapter(flat))).also { latest = it }

    private fun adapter(flat: FloatArray): FloatArray {
        val (spec, tensors) = artifact.manifest.spec to PeftAdapter(artifact).tensors(flat)
        val (rank, scale) = spec.rank to (spec.alpha / spec.rank).toFloat()
        val given = FloatArray(info.adapterSize)
        for (pair in info.layout) {
            val a = tensors.getValue("${pair.linear}.lora_A.weight").floats!!
            val b = tensors.getValue("${pair.linear}.lora_B.weight").floats!!
            for (place in a.indices) given[pair.a + (place % pair.inputs) * rank + place / pair.inputs] = a[place]
            for (place in b.indices) given[pair.b + (place % rank) * pair.outputs + place / rank] = b[place] * scale
        }
        return given
    }

    private inner class Reader(private val adapter: Tensor) : TokenReader {
        private var read = 0

        override val contextTokens: Int get() = info.contextTokens

        override fun feed(ids: IntArray): FloatArray {
            check(latest === this) { "another text has begun, and the program keeps one" }
            checkRoom(ids, read, info.contextTokens)
            var logits = FloatArray(0)
            for (low in ids.indices step info.chunkTokens) {
                val part = ids.copyOfRange(low, minOf(low + info.chunkTokens, ids.size))
                val row = Tensor.of(LongArray(part.size) { part[it].toLong() }, 1, part.size.toLong())
                val outputs = program.execute(METHOD, listOf(row, scalar(read.toLong()), adapter))
                val tensor = outputs.singleOrNull()
                if (tensor?.dtype != DType.FLOAT32 || tensor.count != info.vocab) {
                    throw artifactError("the program that answers gave something else", "float32 [1, ${info.vocab}]", outputs, "export the artifact again")
                }
                logits = tensor.floats()
                read += part.size
            }
            return logits
        }
    }

    private companion object {
        const val METHOD = "forward"
    }
}
