package org.ondevice.core

import java.io.ByteArrayOutputStream
import java.nio.Buffer
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.util.zip.CRC32
import java.util.zip.DataFormatException
import java.util.zip.Inflater

/**
 * A round as a file below 2 kB, as `ondevice fleet carry` reads and writes it (`ondevice/fleet/carry.py`).
 *
 * @property charter as the server wrote it, unpacked.
 * @property device the number that the server gave this device; 64 bits without a sign.
 * @property events of the log that the device lacks, in order.
 */
class FleetFile(
    val charter: ByteArray? = null,
    val device: Long? = null,
    val events: List<ByteArray> = emptyList(),
    val task: ByteArray? = null,
    val answer: ByteArray? = null,
    val signed: FleetSignature? = null,
) {
    /** An answer on its way back. */
    fun toBytes(): ByteArray {
        val out = ByteArrayOutputStream()
        out.write(MAGIC)
        fun entry(kind: Char, data: ByteArray) = out.write(
            ByteBuffer.allocate(3 + data.size).order(ByteOrder.LITTLE_ENDIAN).put(kind.code.toByte()).putShort(data.size.toShort()).put(data).array(),
        )
        device?.let { entry('N', ByteBuffer.allocate(8).order(ByteOrder.LITTLE_ENDIAN).putLong(it).array()) }
        answer?.let { entry('A', it) }
        signed?.let {
            entry('K', it.signer)
            entry('S', it.signature)
        }
        val body = out.toByteArray()
        return body + ByteBuffer.allocate(4).order(ByteOrder.LITTLE_ENDIAN).putInt(crc(body)).array()
    }

    companion object {
        const val SUFFIX = ".odfleet"
        private val MAGIC = "ODCARRY1".toByteArray()
        private const val MOST_CHARTER_BYTES = 1 shl 16

        /** @throws OndeviceException it is none, is damaged, or is of a newer version. */
        fun read(data: ByteArray, name: String): FleetFile {
            val end = data.size - 4
            if (end < MAGIC.size || !data.copyOf(MAGIC.size).contentEquals(MAGIC)) throw fleetError("$name carries no round of a fleet", "a *$SUFFIX file")
            val file = ByteBuffer.wrap(data).order(ByteOrder.LITTLE_ENDIAN)
            if (crc(data.copyOf(end)) != file.getInt(end)) throw damaged(name)
            (file as Buffer).position(MAGIC.size).limit(end) // Buffer's own methods: API 26 has none that give a ByteBuffer
            var found = FleetFile()
            while (file.hasRemaining()) {
                if (file.remaining() < 3) throw damaged(name)
                val kind = file.get().toInt().toChar()
                val size = file.short.toInt() and 0xffff
                if (file.remaining() < size) throw damaged(name)
                val entry = ByteArray(size).also { file.get(it) }
                found = when {
                    kind == 'C' -> found.with(charter = unpacked(entry, name))
                    kind == 'N' && size == 8 -> found.with(device = ByteBuffer.wrap(entry).order(ByteOrder.LITTLE_ENDIAN).long)
                    kind == 'E' -> found.with(events = found.events + entry)
                    kind == 'T' -> found.with(task = entry)
                    kind == 'A' -> found.with(answer = entry)
                    else -> throw fleetError("$name is of a newer version", received = "entry $kind")
                }
            }
            return found
        }

        private fun FleetFile.with(
            charter: ByteArray? = this.charter, device: Long? = this.device, events: List<ByteArray> = this.events,
            task: ByteArray? = this.task, answer: ByteArray? = this.answer,
        ) = FleetFile(charter, device, events, task, answer)

        private fun crc(data: ByteArray): Int = CRC32().apply { update(data) }.value.toInt()

        private fun damaged(name: String) = fleetError("$name is damaged", hint = "send it again")

        private fun unpacked(data: ByteArray, name: String): ByteArray {
            val inflater = Inflater().apply { setInput(data) }
            val out = ByteArray(MOST_CHARTER_BYTES)
            try {
                val size = inflater.inflate(out)
                if (!inflater.finished()) throw damaged(name)
                return out.copyOf(size)
            } catch (_: DataFormatException) {
                throw damaged(name)
            } finally {
                inflater.end()
            }
        }
    }
}
