package org.ondevice.core

import java.io.Closeable
import java.io.File
import java.io.IOException
import java.io.RandomAccessFile

/** What a log holds: its readable lines as JSON objects, each with the byte at which it begins. */
class LogContent(val entries: List<Entry>, val intactBytes: Long) {
    class Entry(val start: Long, val values: Map<String, Any?>) {
        val kind: String get() = values["event"] as? String ?: ""
        val step: Int? get() = (values["step"] as? Long)?.toInt()

        fun number(name: String): Double? = (values[name] as? Number)?.toDouble()
    }

    /** The head of the log, if it is whole. */
    val start: Entry? get() = entries.firstOrNull()?.takeIf { it.kind == "start" }

    /** Loss of every step, by step. */
    val losses: List<Pair<Int, Double>> get() =
        entries.filter { it.kind == "step" }.mapNotNull { entry -> entry.step?.let { it to (entry.number("loss") ?: Double.NaN) } }
}

/**
 * `events.jsonl`: appended line by line, read back after a power cut, cut where a resume begins.
 *
 * @throws OndeviceException [ErrorKind.STORAGE] from every method that writes, if the disk is full.
 */
class EventLog(private val file: File) : Closeable {
    private val out: RandomAccessFile = Storage.writing(file) {
        Storage.makeFolder(file.absoluteFile.parentFile)
        RandomAccessFile(file, "rw").also { it.seek(it.length()) }
    }

    /** Append [event], whole or not at all. */
    fun write(event: Event) = Storage.writing(file) {
        val before = out.filePointer
        try {
            out.write(event.toLine())
        } catch (error: IOException) {
            try {
                out.setLength(before)
            } catch (_: IOException) {
                // the reader leaves out an unfinished line
            }
            throw error
        }
    }

    /** Wait until the disk has every event. */
    fun sync() = Storage.writing(file) { out.fd.sync() }

    override fun close() = out.close()

    companion object {
        const val FILE_NAME = "events.jsonl"

        /** Read a log; one that is not there is empty. Unreadable lines are left out. */
        fun read(file: File): LogContent {
            if (!file.isFile) return LogContent(emptyList(), 0)
            val bytes = file.readBytes()
            val entries = ArrayList<LogContent.Entry>()
            var begin = 0
            var intact = 0
            while (begin < bytes.size) {
                var end = begin
                while (end < bytes.size && bytes[end] != '\n'.code.toByte()) end++
                if (end == bytes.size) break
                val values = try {
                    Json.parse(Storage.decode(bytes.copyOfRange(begin, end))) as? Map<*, *>
                } catch (_: JsonException) {
                    null
                } catch (_: IOException) {
                    null
                }
                if (values?.get("event") is String) {
                    entries.add(LogContent.Entry(begin.toLong(), values.entries.associate { it.key.toString() to it.value }))
                    intact = end + 1
                }
                begin = end + 1
            }
            return LogContent(entries, intact.toLong())
        }

        /** Drop the truncated last line and everything from the first event of step [step] on, and give what is left. */
        fun cut(file: File, step: Int): LogContent {
            val content = read(file)
            val keep = content.entries.firstOrNull { it.kind == "step" && (it.step ?: 0) >= step }?.start ?: content.intactBytes
            if (file.isFile && file.length() != keep) {
                Storage.writing(file) {
                    RandomAccessFile(file, "rw").use {
                        it.setLength(keep)
                        it.fd.sync()
                    }
                }
            }
            return LogContent(content.entries.filter { it.start < keep }, keep)
        }
    }
}
