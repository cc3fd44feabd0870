package org.ondevice.app

import org.ondevice.core.Adapters
import org.ondevice.core.Artifact
import org.ondevice.core.ArtifactInfo
import org.ondevice.core.Encoder
import org.ondevice.core.ErrorKind
import org.ondevice.core.ExampleFile
import org.ondevice.core.JudgedFile
import org.ondevice.core.Library
import org.ondevice.core.OndeviceException
import org.ondevice.core.Preview
import org.ondevice.core.RowReader
import org.ondevice.core.Rows
import org.ondevice.core.Storage
import java.io.ByteArrayOutputStream
import java.io.File
import java.io.InputStream

/** Where the app keeps what: models, data, adapters and runs, all inside its own private folder. */
class Store(private val root: File) {
    val library = Library(File(root, "models"))
    private val dataFolder = File(root, "data")
    private val runsFolder = File(root, "runs")

    /** What the user typed; its name is also what the data screen calls it by. */
    val examples = ExampleFile(File(dataFolder, "my-examples.jsonl"))

    /** Answers that the user judged on the try screen; the data screen shows them, and a run may learn from them. */
    val judged = JudgedFile(File(File(root, "judged"), "answers.jsonl"))

    fun models(): List<ArtifactInfo> = library.list()

    fun open(model: String): Artifact = library.open(model)

    fun adapters(artifact: Artifact): Adapters = Adapters(File(File(root, "adapters"), artifact.folder.name), artifact)

    fun dataFiles(): List<File> = dataFolder.listFiles { file -> file.isFile && !file.name.startsWith(".") && file.length() > 0 }
        ?.sortedBy { it.name } ?: emptyList()

    /** What a run can learn from: the data files, and the judged answers if there are any. */
    fun trainable(): List<File> = dataFiles() + listOf(judged.file).filter { it.length() > 0 }

    /** What a plan calls a file of [trainable]; no data file has a slash in its name. */
    fun nameOf(file: File): String = if (file == judged.file) JUDGED else file.name

    fun dataFile(name: String) = if (name == JUDGED) judged.file else File(dataFolder, name)

    /** Lines of a file, without a table's header. */
    fun lines(file: File): Int = file.useLines { lines -> lines.count { it.isNotBlank() } } - if (RowReader.isTable(file.name)) 1 else 0

    /** Take over a picked file under its own name, once its rows can be read: by their columns, or by a model's task. */
    fun importData(name: String, input: InputStream): File {
        val bytes = readAll(input)
        try {
            RowReader.read(name, bytes)
        } catch (error: OndeviceException) {
            if (error.kind != ErrorKind.DATA || !fitsAModel(name, bytes)) throw error
        }
        val plain = name.map { if (it in "/\\:*?\"<>|" || it < ' ') '_' else it }.joinToString("").trimStart('.').take(80).ifEmpty { "data.jsonl" }
        val stem = plain.substringBeforeLast('.')
        val end = plain.substringAfterLast('.', "jsonl")
        val free = generateSequence(1) { it + 1 }.map { if (it == 1) "$stem.$end" else "$stem $it.$end" }.first { !dataFile(it).exists() }
        return dataFile(free).also { Storage.atomicWrite(it, bytes) }
    }

    private fun fitsAModel(name: String, bytes: ByteArray): Boolean = models().any { model ->
        try {
            model.artifact?.task?.read(name, bytes) != null
        } catch (error: OndeviceException) {
            false
        }
    }

    private fun readAll(input: InputStream): ByteArray {
        val bytes = ByteArrayOutputStream()
        val buffer = ByteArray(1 shl 16)
        while (true) {
            val count = input.read(buffer)
            if (count < 0) return bytes.toByteArray()
            bytes.write(buffer, 0, count)
            if (bytes.size() > MAX_DATA_BYTES) {
                throw OndeviceException(
                    ErrorKind.DATA, "the file is too large to train on a phone", "at most ${MAX_DATA_BYTES shr 20} MiB", "more", "take a part of it",
                )
            }
        }
    }

    fun deleteData(file: File) {
        file.delete()
    }

    /** A file's rows as this model sees them: by the task it was exported for if they fit that, else by their keys. */
    fun rows(file: File, artifact: Artifact): Rows {
        val task = artifact.task ?: return RowReader.read(file)
        try {
            task.read(file.name, file.readBytes()).let { if (it.items.size > it.problems.size) return it }
        } catch (error: OndeviceException) {
            if (error.kind != ErrorKind.DATA && error.kind != ErrorKind.CONFIG) throw error
        }
        return RowReader.read(file)
    }

    /** What of a file a model would learn. */
    fun preview(model: ArtifactInfo, file: File): Preview {
        val artifact = open(model.name)
        val tokenizer = artifact.tokenizer()
        val rows = rows(file, artifact)
        val dataset = Encoder(tokenizer, artifact.manifest.longestTokens).encode(rows, allowEmpty = true)
        return Preview.of(rows, dataset, tokenizer)
    }

    fun runFolder(id: String) = File(runsFolder, id)

    /** Keep the newest runs' logs; their adapters are kept elsewhere. */
    fun pruneRuns(keep: Int = 5) {
        val folders = runsFolder.listFiles { file -> file.isDirectory }?.sortedBy { it.name } ?: return
        folders.dropLast(keep).forEach(Storage::deleteTree)
    }

    private companion object {
        const val JUDGED = "judged/answers.jsonl"
        const val MAX_DATA_BYTES = 64 shl 20
    }
}
