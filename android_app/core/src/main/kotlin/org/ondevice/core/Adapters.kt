package org.ondevice.core

import java.io.File
import java.io.IOException
import java.io.InputStream
import java.io.OutputStream

/**
 * One saved adapter.
 *
 * @property note what the app wrote about it (`note.json`): steps, losses; empty for an imported one.
 * @property problem why it cannot be used; null when it can.
 */
class AdapterInfo(
    val name: String,
    val folder: File,
    val sizeBytes: Long,
    val savedAtMs: Long,
    val active: Boolean,
    val note: Map<String, Any?>,
    val problem: OndeviceException?,
)

/**
 * The adapters of one artifact: a folder each, in PEFT's layout, and which one is active. Every change is
 * atomic; the base model (no adapter) is active at first and can always be gone back to.
 *
 * @param root folder of this artifact's adapters; made at the first save.
 */
class Adapters(private val root: File, private val artifact: Artifact) {
    private val peft = PeftAdapter(artifact)

    /** Newest first. Only the configuration is checked here; [load] checks everything. */
    fun list(): List<AdapterInfo> {
        val active = activeName()
        return folders().map { folder ->
            AdapterInfo(
                folder.name, folder, Storage.sizeBytes(folder), savedAt(folder), folder.name == active, note(folder), problem(folder),
            )
        }.sortedWith(compareByDescending<AdapterInfo> { it.savedAtMs }.thenBy { it.name })
    }

    /** Save a trained vector under a new [name], with what it was trained to do, if that is known. */
    fun save(name: String, flat: FloatArray, note: Map<String, Any?> = emptyMap(), task: TaskRecord? = null): AdapterInfo = put(name) { folder ->
        peft.write(flat, folder)
        writeNote(folder, note)
        if (task != null) Storage.writing(folder) { File(folder, TaskRecord.FILE_NAME).writeText(task.toText()) }
    }

    /** Take over the adapter that a run left in [folder] (`run/adapter`); its own record comes before [task]. */
    fun addFrom(folder: File, name: String, note: Map<String, Any?> = emptyMap(), task: TaskRecord? = null): AdapterInfo =
        save(name, peft.read(folder), note, TaskRecord.read(folder) ?: task)

    /**
     * What an adapter was trained to do: its own record, else the artifact's.
     *
     * @throws OndeviceException [ErrorKind.ARTIFACT]: the record is damaged.
     */
    fun task(name: String): TaskRecord? = TaskRecord.read(existing(name)) ?: artifact.task

    /** The vector of an adapter, wholly checked. */
    fun load(name: String): FloatArray = peft.read(existing(name))

    /** SHA-256 of an adapter's weights: what a run that starts from it remembers. */
    fun sha256(name: String): String = Storage.sha256(File(existing(name), PeftAdapter.WEIGHTS_NAME))

    /** Name of the adapter in use; null for the base model. */
    fun activeName(): String? = history().lastOrNull()?.takeIf { File(root, it).isDirectory }

    /** The vector in use; the one that a run starts from for the base model. */
    fun activeVector(): FloatArray = activeName()?.let(::load) ?: artifact.first(artifact.manifest.spec.adapter).floats()

    /** Use [name] from now on, or the base model for null. An adapter that cannot be read is refused. */
    fun activate(name: String?) {
        if (name != null) load(name)
        val known = history()
        if (known.lastOrNull() != name) writeHistory(known + name)
    }

    /** Go back to what was active before; gives its name, null for the base model. */
    fun rollBack(): String? {
        val known = history()
        if (known.isEmpty()) throw artifactError("the base model is in use already: there is nothing to roll back to")
        writeHistory(known.dropLast(1))
        return activeName()
    }

    /** Delete an adapter; if it was active, what was active before is again. */
    fun delete(name: String) {
        val folder = existing(name)
        writeHistory(history().filter { it != name })
        val aside = File(root, ".deleted-$name")
        root.listFiles()?.filter { it.name.startsWith(".deleted-") }?.forEach(Storage::deleteTree)
        if (!folder.renameTo(aside)) throw storageError("cannot delete the adapter $name", hint = "try again")
        Storage.deleteTree(aside)
    }

    /** Write a zip of the adapter for sharing: PEFT's files, and mlx-lm's in a folder of their own; [out] is left open. */
    fun zip(name: String, out: OutputStream) {
        val folder = existing(name)
        val flat = load(name)
        val both = File(root, ".share-$name")
        Storage.writing(folder) {
            try {
                Storage.deleteTree(both)
                folder.copyRecursively(both)
                val mlx = File(both, MLX_LM)
                Storage.makeFolder(mlx)
                MlxLmAdapter(artifact).write(flat, mlx)
                Zips.write(both, out)
            } finally {
                Storage.deleteTree(both)
            }
        }
    }

    /** Unpack a shared zip under a new [name], wholly checked against this artifact. */
    fun importZip(input: InputStream, name: String): AdapterInfo = put(name) { folder ->
        Zips.read(input, folder, minOf(MAX_ZIP_BYTES, folder.usableSpace), PeftAdapter.CONFIG_NAME, maxFiles = 16)
        peft.read(folder)
        folder.listFiles()?.filter { it.name !in KEPT }?.forEach(Storage::deleteTree)
    }

    private fun put(name: String, fill: (File) -> Unit): AdapterInfo {
        val bad = name.isBlank() || name.startsWith(".") || name.length > 80 || name.any { it in "/\\:*?\"<>|" || it < ' ' }
        if (bad) throw artifactError("'$name' cannot be an adapter's name", "up to 80 characters without / \\ : * ? \" < > | and not '.' first", name)
        val folder = File(root, name)
        if (folder.exists()) throw artifactError("there is an adapter '$name' already", "a new name", name, "choose another name, or delete it first")
        Storage.atomicFolder(folder, fill)
        return list().first { it.name == name }
    }

    private fun existing(name: String): File = folders().firstOrNull { it.name == name }
        ?: throw artifactError("there is no adapter '$name'", folders().joinToString(", ") { it.name }.ifEmpty { "none saved yet" }, name)

    private fun folders(): List<File> = root.listFiles()?.filter { it.isDirectory && !it.name.startsWith(".") }?.sortedBy { it.name } ?: emptyList()

    private fun problem(folder: File): OndeviceException? = try {
        if (!File(folder, PeftAdapter.WEIGHTS_NAME).isFile) throw artifactError("${folder.name} lacks a file", PeftAdapter.WEIGHTS_NAME)
        Fields.parse(Storage.readText(File(folder, PeftAdapter.CONFIG_NAME)), PeftAdapter.CONFIG_NAME).text("peft_type")
        null
    } catch (error: OndeviceException) {
        error
    } catch (error: IOException) {
        artifactError("${PeftAdapter.CONFIG_NAME} cannot be read", received = error.message, hint = "delete this adapter")
    }

    private fun savedAt(folder: File): Long = (note(folder)["saved_at_ms"] as? Long) ?: folder.lastModified()

    private fun note(folder: File): Map<String, Any?> = try {
        (Json.parse(Storage.readText(File(folder, NOTE))) as? Map<*, *>)?.entries?.associate { it.key.toString() to it.value } ?: emptyMap()
    } catch (_: IOException) {
        emptyMap()
    } catch (_: JsonException) {
        emptyMap()
    }

    private fun writeNote(folder: File, note: Map<String, Any?>) = Storage.writing(folder) {
        File(folder, NOTE).writeText(Json.write(note + ("saved_at_ms" to System.currentTimeMillis()), "  ") + "\n")
    }

    /** What was active, oldest first; null stands for the base model. A damaged file counts as none. */
    private fun history(): List<String?> = try {
        val values = Json.parse(Storage.readText(File(root, ACTIVE))) as? Map<*, *>
        (values?.get("history") as? List<*>)?.map { it as? String } ?: emptyList()
    } catch (_: IOException) {
        emptyList()
    } catch (_: JsonException) {
        emptyList()
    }

    private fun writeHistory(history: List<String?>) =
        Storage.atomicWrite(File(root, ACTIVE), Json.write(mapOf("history" to history.takeLast(MAX_HISTORY)), "  ") + "\n")

    private companion object {
        const val NOTE = "note.json"
        const val MLX_LM = "mlx-lm"
        const val ACTIVE = "active.json"
        const val MAX_HISTORY = 50
        const val MAX_ZIP_BYTES = 1L shl 30
        val KEPT = setOf(PeftAdapter.WEIGHTS_NAME, PeftAdapter.CONFIG_NAME, TaskRecord.FILE_NAME, NOTE)
    }
}
