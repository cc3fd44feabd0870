package org.ondevice.core

import java.io.File
import java.io.FileInputStream
import java.io.FileOutputStream
import java.io.IOException
import java.io.InputStream
import java.nio.ByteBuffer
import java.nio.channels.FileChannel
import java.nio.charset.CharacterCodingException
import java.nio.charset.CodingErrorAction
import java.nio.file.Files
import java.nio.file.StandardCopyOption
import java.nio.file.StandardOpenOption
import java.security.MessageDigest
import java.util.UUID

/**
 * Files and folders that are either whole or not there: written beside, flushed to the disk, then renamed.
 *
 * A killed process or a full disk at any moment leaves the previous content under the name. Every failed write
 * is a [ErrorKind.STORAGE] error that says how much is free.
 */
object Storage {
    private const val PARTIAL = ".partial-"
    private const val CHUNK_BYTES = 1 shl 16

    /** Replace the file by [content], all at once. */
    fun atomicWrite(file: File, content: ByteArray) = writing(file) {
        makeFolder(file.absoluteFile.parentFile)
        removeLeftovers(file)
        val partial = beside(file)
        try {
            FileOutputStream(partial).use { out ->
                out.write(content)
                out.fd.sync()
            }
            move(partial, file)
        } finally {
            partial.delete()
        }
        syncFolder(file.absoluteFile.parentFile)
    }

    fun atomicWrite(file: File, content: String) = atomicWrite(file, content.toByteArray(Charsets.UTF_8))

    /**
     * Make an empty folder, let [fill] fill it, and give it the name [target], replacing what was there.
     *
     * A folder that is replaced has another name for the moment between two renames.
     */
    fun <T> atomicFolder(target: File, fill: (File) -> T): T = writing(target) {
        val place = target.absoluteFile
        makeFolder(place.parentFile)
        removeLeftovers(place)
        val partial = beside(place)
        try {
            if (!partial.mkdir()) throw IOException("cannot make the folder $partial")
            val result = fill(partial)
            syncTree(partial)
            if (place.exists()) {
                val old = beside(place)
                move(place, old)
                move(partial, place)
                deleteTree(old)
            } else {
                move(partial, place)
            }
            syncFolder(place.parentFile)
            result
        } finally {
            deleteTree(partial)
        }
    }

    /** Delete what killed processes left half written beside [target]; nobody else may be writing it. */
    fun removeLeftovers(target: File) {
        val start = ".${target.name}$PARTIAL"
        target.absoluteFile.parentFile?.listFiles()?.filter { it.name.startsWith(start) }?.forEach(::deleteTree)
    }

    /** Delete a file or a folder with all it holds; links are not followed. What is not there is no error. */
    fun deleteTree(file: File) {
        if (!Files.isSymbolicLink(file.toPath())) file.listFiles()?.forEach(::deleteTree)
        file.delete()
    }

    /** SHA-256 as 64 hexadecimal digits, in constant memory. */
    fun sha256(file: File): String = FileInputStream(file).use { sha256(it) }

    fun sha256(stream: InputStream): String {
        val digest = MessageDigest.getInstance("SHA-256")
        val buffer = ByteArray(CHUNK_BYTES)
        while (true) {
            val count = stream.read(buffer)
            if (count < 0) return hex(digest.digest())
            digest.update(buffer, 0, count)
        }
    }

    fun sha256(bytes: ByteArray): String = hex(MessageDigest.getInstance("SHA-256").digest(bytes))

    fun hex(bytes: ByteArray): String {
        val text = StringBuilder(bytes.size * 2)
        for (byte in bytes) {
            val value = byte.toInt() and 0xff
            text.append("0123456789abcdef"[value shr 4]).append("0123456789abcdef"[value and 15])
        }
        return text.toString()
    }

    /** The bytes that [hex] wrote. */
    fun bytes(hex: String) = ByteArray(hex.length / 2) { hex.substring(2 * it, 2 * it + 2).toInt(16).toByte() }

    /** Bytes of all files below [folder]. */
    fun sizeBytes(folder: File): Long =
        folder.listFiles()?.fold(0L) { sum, file -> sum + if (file.isDirectory) sizeBytes(file) else file.length() } ?: 0L

    /**
     * [name] as a relative path that stays inside a folder: parts between `/`, none empty, `.` or `..`.
     * Null where it would not.
     */
    fun safeRelative(name: String): String? {
        val parts = name.split('/')
        val bad = name.isEmpty() || '\\' in name || '\u0000' in name || parts.any { it.isEmpty() || it == "." || it == ".." }
        return if (bad) null else name
    }

    /** UTF-8 text of a file; bytes that are not UTF-8 are an [IOException]. */
    internal fun readText(file: File): String = decode(file.readBytes())

    @Throws(CharacterCodingException::class)
    internal fun decode(bytes: ByteArray): String = Charsets.UTF_8.newDecoder()
        .onMalformedInput(CodingErrorAction.REPORT)
        .onUnmappableCharacter(CodingErrorAction.REPORT)
        .decode(ByteBuffer.wrap(bytes)).toString()

    internal fun makeFolder(folder: File?) {
        if (folder != null && !folder.isDirectory && !folder.mkdirs() && !folder.isDirectory) {
            throw IOException("cannot make the folder $folder")
        }
    }

    /** Run [body]; an IOException becomes a storage error that names [target]. */
    internal fun <T> writing(target: File, body: () -> T): T = try {
        body()
    } catch (error: IOException) {
        var place: File? = target.absoluteFile
        while (place != null && !place.exists()) place = place.parentFile
        val free = place?.let { "; ${it.usableSpace shr 20} MiB free" } ?: ""
        throw storageError(
            "cannot write ${target.name}", "${error.message}$free",
            "free some storage and try again; what was there before is unharmed", error,
        )
    }

    private fun beside(target: File) =
        File(target.absoluteFile.parentFile, ".${target.name}$PARTIAL${UUID.randomUUID().toString().take(8)}")

    private fun move(from: File, to: File) {
        Files.move(from.toPath(), to.toPath(), StandardCopyOption.ATOMIC_MOVE, StandardCopyOption.REPLACE_EXISTING)
    }

    private fun syncTree(folder: File) {
        for (file in folder.listFiles() ?: emptyArray()) {
            if (file.isDirectory) {
                syncTree(file)
            } else {
                FileChannel.open(file.toPath(), StandardOpenOption.WRITE).use { it.force(true) }
            }
        }
        syncFolder(folder)
    }

    private fun syncFolder(folder: File?) {
        try {
            FileChannel.open((folder ?: return).toPath(), StandardOpenOption.READ).use { it.force(true) }
        } catch (_: IOException) {
            // Some file systems refuse to flush a folder; the files themselves are on the disk.
        }
    }
}
