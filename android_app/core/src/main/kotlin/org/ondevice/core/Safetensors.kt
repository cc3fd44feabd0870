package org.ondevice.core

import java.io.File
import java.io.RandomAccessFile
import java.nio.ByteBuffer
import java.nio.ByteOrder

/** One named array of a safetensors file: float32 or int64, row-major, copied. */
class StoredTensor private constructor(val shape: List<Int>, val floats: FloatArray?, val longs: LongArray?) {
    constructor(shape: List<Int>, values: FloatArray) : this(shape, values, null)

    constructor(shape: List<Int>, values: LongArray) : this(shape, null, values)

    val bytes: Int get() = floats?.let { it.size * 4 } ?: (longs!!.size * 8)

    /** The same elements as an input of a program, not copied. */
    fun tensor(): Tensor {
        val sizes = LongArray(shape.size) { shape[it].toLong() }
        return floats?.let { Tensor.of(it, *sizes) } ?: Tensor.of(longs!!, *sizes)
    }

    internal fun put(buffer: ByteBuffer) {
        floats?.forEach { buffer.putFloat(it) }
        longs?.forEach { buffer.putLong(it) }
    }

    companion object {
        /** The elements of a program's output, not copied. */
        fun of(tensor: Tensor, shape: List<Int>): StoredTensor =
            if (tensor.dtype == DType.FLOAT32) StoredTensor(shape, tensor.floats()) else StoredTensor(shape, tensor.longs())
    }
}

/** A safetensors file: named tensors and texts about them. */
class Safetensors(val tensors: Map<String, StoredTensor>, val metadata: Map<String, String> = emptyMap()) {
    /** The file's bytes, in the order in which the reference writer puts tensors: wide types first, then by name. */
    fun toBytes(): ByteArray {
        val order = tensors.entries.sortedWith(compareBy({ it.value.longs == null }, { it.key }))
        val header = LinkedHashMap<String, Any?>()
        if (metadata.isNotEmpty()) header["__metadata__"] = metadata
        var offset = 0L
        for ((name, tensor) in order) {
            val end = offset + tensor.bytes
            header[name] = linkedMapOf(
                "dtype" to if (tensor.longs == null) "F32" else "I64", "shape" to tensor.shape, "data_offsets" to listOf(offset, end),
            )
            offset = end
        }
        val text = Json.write(header).toByteArray(Charsets.UTF_8)
        val padded = text + ByteArray((8 - text.size % 8) % 8) { ' '.code.toByte() }
        val buffer = ByteBuffer.allocate(8 + padded.size + offset.toInt()).order(ByteOrder.LITTLE_ENDIAN)
        buffer.putLong(padded.size.toLong()).put(padded)
        for ((_, tensor) in order) tensor.put(buffer)
        return buffer.array()
    }

    companion object {
        private const val MAX_HEADER_BYTES = 16L shl 20

        /**
         * Read a file of float32, float16, bfloat16 (all as float32) and int64 tensors.
         *
         * @throws OndeviceException [ErrorKind.ARTIFACT] when it is damaged or no safetensors file.
         */
        fun read(file: File): Safetensors {
            if (!file.isFile) throw artifactError("${file.parentFile?.name ?: ""} lacks a file", file.name, "no such file", "copy it again")
            try {
                RandomAccessFile(file, "r").use { return parse(it, file.name) }
            } catch (error: java.io.IOException) {
                throw damaged(file.name, error.message ?: "cannot be read")
            }
        }

        private fun parse(source: RandomAccessFile, name: String): Safetensors {
            val total = source.length()
            if (total < 8) throw damaged(name, "$total bytes")
            val length = java.lang.Long.reverseBytes(source.readLong())
            if (length < 2 || length > minOf(total - 8, MAX_HEADER_BYTES)) throw damaged(name, "a header of $length bytes in a file of $total")
            val head = ByteArray(length.toInt()).also(source::readFully)
            val header = Fields.parse(Storage.decode(head), name)
            val tensors = LinkedHashMap<String, StoredTensor>()
            for (key in header.keys) {
                if (key != "__metadata__") tensors[key] = tensor(source, header.fields(key), 8 + length, total, name, key)
            }
            val metadata = if (header.has("__metadata__")) header.map("__metadata__").mapValues { it.value.toString() } else emptyMap()
            return Safetensors(tensors, metadata)
        }

        private fun tensor(source: RandomAccessFile, entry: Fields, data: Long, total: Long, file: String, key: String): StoredTensor {
            val shape = entry.ints("shape", 0..(1 shl 30))
            val count = shape.fold(1L) { product, size -> product * size }
            val offsets = entry.list("data_offsets").map { it as? Long ?: throw entry.wrong("data_offsets", "two integers", it) }
            val dtype = entry.text("dtype")
            val width = mapOf("F32" to 4, "F16" to 2, "BF16" to 2, "I64" to 8)[dtype]
                ?: throw artifactError("$file: tensor '$key' has a dtype that the app does not read", "F32, F16, BF16 or I64", dtype)
            val good = offsets.size == 2 && offsets[0] >= 0 && offsets[1] - offsets[0] == count * width && data + offsets[1] <= total
            if (!good || count > (1 shl 28)) throw damaged(file, "tensor '$key' ends behind the file")
            val bytes = ByteArray((count * width).toInt())
            source.seek(data + offsets[0])
            source.readFully(bytes)
            val buffer = ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN)
            return when (dtype) {
                "I64" -> StoredTensor(shape, LongArray(count.toInt()) { buffer.long })
                "F32" -> StoredTensor(shape, FloatArray(count.toInt()) { buffer.float })
                "BF16" -> StoredTensor(shape, FloatArray(count.toInt()) { Float.fromBits(buffer.short.toInt() shl 16) })
                else -> StoredTensor(shape, FloatArray(count.toInt()) { half(buffer.short.toInt() and 0xffff) })
            }
        }

        private fun half(bits: Int): Float {
            val sign = if (bits and 0x8000 != 0) -1f else 1f
            val exponent = (bits shr 10) and 31
            val mantissa = bits and 0x3ff
            return sign * when (exponent) {
                0 -> mantissa * 5.9604645E-8f
                31 -> if (mantissa == 0) Float.POSITIVE_INFINITY else Float.NaN
                else -> Float.fromBits(((exponent + 112) shl 23) or (mantissa shl 13))
            }
        }

        private fun damaged(name: String, received: String) =
            artifactError("$name is damaged or no safetensors file", "a whole safetensors file", received, "copy it again")
    }
}
