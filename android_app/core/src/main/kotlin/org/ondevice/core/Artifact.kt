package org.ondevice.core

import java.io.File

/** An artifact's folder with its checked manifest. */
class Artifact(val folder: File, val manifest: Manifest) {
    val programFile: File get() = File(folder, manifest.program)

    /** The file with [method] in it, of a layer if every layer has its own. */
    fun programFile(method: String, layer: Int): File =
        manifest.spec.methods[method]?.program?.let { File(folder, BlockSteps.ofLayer(it, layer)) } ?: programFile

    /** Bytes that the runtime maps: the programs, and of a block program the weights. */
    val mappedBytes: Long get() = (listOf(manifest.program) + listOfNotNull(manifest.spec.blocks?.weights) + manifest.spec.layerPrograms).sumOf { File(folder, it).length() }

    /** What answers with packed weights, and its program; null where nothing does. */
    val answers: AnswersInfo? by lazy { if (manifest.hasPackedAnswers) AnswersInfo.read(folder, manifest.spec) else null }
    val answersFile: File get() = File(folder, AnswersInfo.PROGRAM_NAME)

    /** What its rows are and how they are asked; null where neither a record nor a task says so. */
    val task: TaskRecord? by lazy {
        TaskRecord.read(folder) ?: manifest.task?.let { name -> Tasks.ALL[Tasks.plainName(name)] }?.let { TaskRecord.of(it) }
    }

    /** The tokenizer that the program was made for; reading it takes a moment, keep it. */
    fun tokenizer(): Tokenizer = TokenizerFile.read(File(folder, TOKENIZER_FOLDER))

    /** The A matrices that are not trained, by [AdapterEntry.aName]; the file is read when they are first asked for. */
    val frozen: Map<String, StoredTensor> by lazy { manifest.spec.frozen?.let { Safetensors.read(File(folder, it)).tensors } ?: emptyMap() }

    /**
     * The value of a state tensor that a run starts from.
     *
     * @throws OndeviceException [ErrorKind.ARTIFACT]: its file lacks it, or holds another dtype or shape.
     */
    fun first(tensor: StateTensor): Tensor {
        val count = tensor.shape.fold(1) { product, length -> product * length }
        val value = when {
            tensor.first != null -> Safetensors.read(File(folder, tensor.first)).tensors[tensor.name]
            tensor.dtype == DType.FLOAT32 -> StoredTensor(tensor.shape, FloatArray(count))
            else -> StoredTensor(tensor.shape, LongArray(count))
        }
        if (value == null || value.shape != tensor.shape || value.tensor().dtype != tensor.dtype) {
            throw artifactError(
                "${tensor.first} does not fit the manifest", "${tensor.name} ${tensor.dtype.manifestName} ${tensor.shape}",
                value?.tensor() ?: "no such tensor", "export the model again",
            )
        }
        return value.tensor()
    }

    companion object {
        const val TOKENIZER_FOLDER = "tokenizer"
        const val TOKENIZER_FILE = "$TOKENIZER_FOLDER/tokenizer.json"

        /**
         * Open and check an artifact.
         *
         * @param checkFiles hash every file; needed once after a copy, a moment for each 100 MB.
         * @param linkedOps this project's own ops that the app's runtime links; empty for the stock AAR.
         * @throws OndeviceException [ErrorKind.ARTIFACT], see [ManifestReader.read] and [Manifest.requireOps].
         */
        fun open(folder: File, checkFiles: Boolean = true, linkedOps: Set<String> = emptySet()): Artifact {
            val manifest = ManifestReader.read(folder, checkFiles)
            manifest.requireOps(linkedOps)
            return Artifact(folder, manifest)
        }
    }
}
