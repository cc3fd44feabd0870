package org.ondevice.core

import java.io.File
import java.io.IOException
import java.io.InputStream

/**
 * An artifact in storage and what it needs.
 *
 * @property manifest null when it cannot be used; [problem] then says why.
 * @property sizeBytes of all its files.
 */
class ArtifactInfo(val name: String, val folder: File, val sizeBytes: Long, val manifest: Manifest?, val problem: OndeviceException?) {
    /** The artifact itself, where it can be used. */
    val artifact: Artifact? get() = manifest?.let { Artifact(folder, it) }

    /** Bytes that the runtime maps, see [Artifact.mappedBytes]. */
    val mappedBytes: Long get() = artifact?.mappedBytes ?: 0

    /** Working memory that the program plans, highest of its methods, without what delegates take. */
    val plannedBytes: Long get() = manifest?.plannedBytes ?: 0
}

/**
 * The artifacts of the app, a folder each.
 *
 * @param root the app's own folder for them; made at the first import.
 * @param linkedOps this project's own ops that the app's runtime links.
 */
class Library(private val root: File, private val linkedOps: Set<String> = emptySet()) {
    /** By name. Manifests are checked; files are hashed only at import and by [Artifact.open]. */
    fun list(): List<ArtifactInfo> = folders().map(::describe)

    /** Open one for use; [checkFiles] hashes every file again. */
    fun open(name: String, checkFiles: Boolean = false): Artifact {
        val folder = folders().firstOrNull { it.name == name }
            ?: throw artifactError("there is no model '$name'", folders().joinToString(", ") { it.name }.ifEmpty { "none imported yet" }, name, "import it")
        return Artifact.open(folder, checkFiles, linkedOps)
    }

    /**
     * Import a zip of an artifact's folder; nothing is kept unless all of it is right.
     *
     * @param name wished for; a number is put behind it when it is taken.
     * @param maxBytes of the unpacked files; the free space of the disk is a limit in any case.
     */
    fun importZip(input: InputStream, name: String, maxBytes: Long = MAX_BYTES): ArtifactInfo = import(name) { folder ->
        Zips.read(input, folder, minOf(maxBytes, free()), ManifestReader.FILE_NAME)
    }

    /**
     * Import a folder whose files the caller hands over one by one (the system's picker gives streams, not paths).
     *
     * @param files relative name and a function that opens it.
     */
    fun importFiles(name: String, files: List<Pair<String, () -> InputStream>>): ArtifactInfo = import(name) { folder ->
        for ((relative, open) in files) {
            val safe = Storage.safeRelative(relative)
                ?: throw artifactError("a file's name leaves its folder", "relative names without '..'", relative, "choose the artifact's folder")
            val target = File(folder, safe)
            Storage.makeFolder(target.parentFile)
            open().use { from -> target.outputStream().use { from.copyTo(it) } }
        }
    }

    /** Delete an artifact; its runs and adapters, which lie elsewhere, stay. */
    fun delete(name: String) {
        val folder = folders().firstOrNull { it.name == name } ?: throw artifactError("there is no model '$name'", received = name)
        val aside = File(root, ".deleted-$name")
        root.listFiles()?.filter { it.name.startsWith(".deleted-") }?.forEach(Storage::deleteTree)
        if (!folder.renameTo(aside)) throw storageError("cannot delete the model $name", hint = "stop training with it first")
        Storage.deleteTree(aside)
    }

    private fun import(name: String, fill: (File) -> Unit): ArtifactInfo {
        val target = File(root, freeName(name))
        Storage.atomicFolder(target) { folder ->
            fill(folder)
            Artifact.open(folder, checkFiles = true, linkedOps = linkedOps).tokenizer()
        }
        return describe(target)
    }

    private fun describe(folder: File): ArtifactInfo {
        val size = Storage.sizeBytes(folder)
        return try {
            val artifact = Artifact.open(folder, checkFiles = false, linkedOps = linkedOps)
            val missing = artifact.manifest.files.keys.firstOrNull { !File(folder, it).isFile }
            if (missing != null) throw artifactError("${folder.name} lacks a file", missing, "no such file", "import it again")
            ArtifactInfo(folder.name, folder, size, artifact.manifest, null)
        } catch (error: OndeviceException) {
            ArtifactInfo(folder.name, folder, size, null, error)
        } catch (error: IOException) {
            ArtifactInfo(folder.name, folder, size, null, artifactError("${folder.name} cannot be read", received = error.message))
        }
    }

    private fun folders(): List<File> = root.listFiles()?.filter { it.isDirectory && !it.name.startsWith(".") }?.sortedBy { it.name } ?: emptyList()

    private fun free(): Long {
        Storage.writing(root) { Storage.makeFolder(root) }
        return root.usableSpace
    }

    private fun freeName(wish: String): String {
        val plain = wish.map { if (it in "/\\:*?\"<>|" || it < ' ') '_' else it }.joinToString("").trim().trimStart('.').take(80).ifEmpty { "model" }
        if (!File(root, plain).exists()) return plain
        return generateSequence(2) { it + 1 }.map { "$plain $it" }.first { !File(root, it).exists() }
    }

    private companion object {
        const val MAX_BYTES = 16L shl 30
    }
}
