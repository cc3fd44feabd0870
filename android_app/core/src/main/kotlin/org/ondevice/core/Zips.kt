package org.ondevice.core

import java.io.File
import java.io.FileOutputStream
import java.io.InputStream
import java.io.OutputStream
import java.util.zip.ZipEntry
import java.util.zip.ZipException
import java.util.zip.ZipInputStream
import java.util.zip.ZipOutputStream

/** Zip files in and out: names cannot leave the folder, and sizes are counted while reading. */
internal object Zips {
    /** Write every file below [folder] under its relative name; [out] is left open. */
    fun write(folder: File, out: OutputStream) {
        val zip = ZipOutputStream(out)
        for (file in files(folder)) {
            zip.putNextEntry(ZipEntry(file.relativeTo(folder).invariantSeparatorsPath))
            file.inputStream().use { it.copyTo(zip) }
            zip.closeEntry()
        }
        zip.finish()
    }

    /**
     * Unpack [input] into the empty [folder]. A single folder at the top is taken off.
     *
     * @param maxBytes of all files unpacked together.
     * @param marker a file whose folder becomes the top: what a zip of the wrong kind does not have.
     * @throws OndeviceException [ErrorKind.ARTIFACT] for a name like `../x`, too much or no zip at all.
     */
    fun read(input: InputStream, folder: File, maxBytes: Long, marker: String, maxFiles: Int = 4096) {
        var bytes = 0L
        var count = 0
        try {
            val zip = ZipInputStream(input)
            while (true) {
                val entry = zip.nextEntry ?: break
                if (entry.isDirectory) continue
                val name = Storage.safeRelative(entry.name) ?: throw artifactError(
                    "the zip has a name that leaves its folder", "relative names without '..'", entry.name, "do not trust this one",
                )
                if (++count > maxFiles) throw artifactError("the zip has too many files", "at most $maxFiles", "more", "choose the zip of one folder")
                val target = File(folder, name)
                Storage.makeFolder(target.parentFile)
                FileOutputStream(target).use { out -> bytes = copy(zip, out, bytes, maxBytes) }
            }
        } catch (error: ZipException) {
            throw artifactError("the file is no readable zip", "a zip", error.message, "copy it again")
        } catch (error: java.io.EOFException) {
            throw artifactError("the zip is cut off", "a whole zip", error.message, "copy it again")
        } catch (error: IllegalArgumentException) {
            throw artifactError("the zip has a name that is not UTF-8", "UTF-8", error.message, "make it again")
        }
        if (count == 0) throw artifactError("the file is no zip, or an empty one", "a zip with $marker", "no entry", "choose another file")
        liftTop(folder, marker)
    }

    private fun copy(from: InputStream, to: OutputStream, before: Long, maxBytes: Long): Long {
        val buffer = ByteArray(1 shl 16)
        var bytes = before
        while (true) {
            val count = from.read(buffer)
            if (count < 0) return bytes
            bytes += count
            if (bytes > maxBytes) {
                val most = "at most ${maxBytes shr 20} MiB"
                throw artifactError("the zip unpacks to more than fits", most, "more", "free storage, or choose another file")
            }
            to.write(buffer, 0, count)
        }
    }

    /** Where everything lies in one folder (as most tools zip), make its content the top. */
    private fun liftTop(folder: File, marker: String) {
        if (File(folder, marker).isFile) return
        val top = folder.listFiles()?.singleOrNull { it.isDirectory && File(it, marker).isFile }
            ?: throw artifactError("the zip holds something else", marker, folder.list()?.sorted()?.take(5), "choose another file")
        val aside = File(folder, ".top-of-zip")
        if (!top.renameTo(aside)) throw java.io.IOException("cannot rename $top")
        for (file in aside.listFiles() ?: emptyArray()) if (!file.renameTo(File(folder, file.name))) throw java.io.IOException("cannot move $file")
        aside.delete()
    }

    private fun files(folder: File): List<File> =
        (folder.listFiles() ?: emptyArray()).sortedBy { it.name }.flatMap { if (it.isDirectory) files(it) else listOf(it) }
}
