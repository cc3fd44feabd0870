package org.ondevice.core

import java.io.File
import java.io.IOException
import java.io.RandomAccessFile
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.channels.FileChannel

/**
 * The frozen weights of a block program, in the file where they lie: a safetensors file whose tensors begin at multiples
 * of [ALIGNMENT_BYTES], so that the runtime reads them without a copy. What is mapped is no memory of this process: the
 * system may drop it and read it again.
 *
 * @throws OndeviceException [ErrorKind.ARTIFACT]: the file is missing, truncated or not aligned.
 */
class MappedWeights(private val file: File) {
    private class Place(val dtype: DType, val shape: List<Int>, val first: Long)

    private val places = LinkedHashMap<String, Place>()
    private val mapped = HashMap<Triple<String, Int, List<Int>>, Tensor>()

    init {
        try {
            RandomAccessFile(file, "r").use { read(it) }
        } catch (error: IOException) {
            throw artifactError("${file.name} cannot be read", "the program's weights", error.message, COPY)
        } catch (error: ArithmeticException) {
            throw artifactError("${file.name} is no whole safetensors file", "sizes of tensors", error.message, COPY)
        }
    }

    /** Names of the tensors, in the order of the file. */
    val names: Set<String> get() = places.keys

    /**
     * Refuse weights of another model: [port] must find a tensor of its name ([name], with the layer's number), dtype and
     * shape. Of the first dimension the file may have more, for tables that are taken in tiles.
     *
     * @throws OndeviceException [ErrorKind.ARTIFACT].
     */
    fun check(port: Port, name: String) {
        val place = places[name]
        val fits = place != null && place.dtype == port.dtype && place.shape.size == port.shape.size &&
            place.shape.drop(1) == port.shape.drop(1) && place.shape[0] >= port.shape[0]
        if (fits) return
        throw artifactError(
            "${file.name} holds the weights of another model: $name", "${port.dtype.manifestName} ${port.shape}",
            place?.let { "${it.dtype.manifestName} ${it.shape}" } ?: "no such tensor", COPY,
        )
    }

    /**
     * The tensor [name] as [port] takes it: the whole of it, or a tile of as many rows as the port has from [firstRow] on.
     * What is mapped stays so as long as this object lives.
     */
    fun tensor(port: Port, name: String, firstRow: Int = 0): Tensor {
        check(port, name)
        val place = places.getValue(name)
        val first = if (place.shape[0] == port.shape[0]) 0 else firstRow
        require(first >= 0 && first + port.shape[0] <= place.shape[0]) { "$name has ${place.shape[0]} rows, not $first + ${port.shape[0]}" }
        return mapped.getOrPut(Triple(name, first, port.shape)) { tile(port, name, place, first) }
    }

    private fun tile(port: Port, name: String, place: Place, firstRow: Int): Tensor {
        val rowBytes = place.shape.drop(1).fold(place.dtype.bytes.toLong()) { bytes, length -> bytes * length }
        val bytes = rowBytes * port.shape[0]
        if (bytes > Int.MAX_VALUE) {
            throw artifactError(
                "$name is too large for one of Java's buffers", "at most ${Int.MAX_VALUE} bytes", bytes,
                "export the model with --quantize int8, or with more method.loss_tiles",
            )
        }
        return Tensor.of(MappedRows(name, firstRow, map(place.first + firstRow * rowBytes, bytes)), place.dtype, *port.lengths())
    }

    private fun map(first: Long, bytes: Long): ByteBuffer = try {
        RandomAccessFile(file, "r").use { it.channel.map(FileChannel.MapMode.READ_ONLY, first, bytes) }.order(ByteOrder.nativeOrder())
    } catch (error: IOException) {
        throw artifactError("${file.name} cannot be mapped", received = error.message, hint = "close other apps and try again")
    }

    private fun read(source: RandomAccessFile) {
        val size = source.length()
        val length = if (size < 8) 0 else java.lang.Long.reverseBytes(source.readLong())
        if (length < 2 || length > minOf(size - 8, MAX_HEADER_BYTES)) {
            throw artifactError("${file.name} is no whole safetensors file", "a header", "a header of $length bytes in a file of $size", COPY)
        }
        val header = Fields.parse(Storage.decode(ByteArray(length.toInt()).also(source::readFully)), file.name)
        for (name in header.keys) if (name != "__metadata__") places[name] = place(name, header.fields(name), 8 + length, size)
    }

    private fun place(name: String, entry: Fields, data: Long, size: Long): Place {
        val stored = entry.text("dtype")
        val dtype = DType.values().firstOrNull { it.stored == stored && it != DType.INT64 } ?: throw entry.wrong("dtype", "F32, F16, I8 or U8", stored)
        val shape = entry.ints("shape", 0..Int.MAX_VALUE)
        val offsets = entry.list("data_offsets").map { it as? Long ?: throw entry.wrong("data_offsets", "two integers", it) }
        val bytes = shape.fold(dtype.bytes.toLong()) { product, length -> Math.multiplyExact(product, length.toLong()) }
        if (offsets.size != 2 || offsets[0] < 0 || offsets[1] - offsets[0] != bytes) throw entry.wrong("data_offsets", "$bytes bytes, as the shape $shape says", offsets)
        val first = data + offsets[0]
        if (first + bytes > size) throw artifactError("${file.name} is truncated at '$name'", "${first + bytes} bytes", size, COPY)
        if (first % ALIGNMENT_BYTES != 0L && !name.startsWith(PADDING)) {
            throw artifactError("${file.name}: '$name' is not aligned", "a multiple of $ALIGNMENT_BYTES bytes", first, COPY)
        }
        return Place(dtype, shape, first)
    }

    companion object {
        const val ALIGNMENT_BYTES = 64L

        /** Begins the names of the tensors that fill up the place between two others. */
        private const val PADDING = "__padding"
        private const val MAX_HEADER_BYTES = 64L shl 20
        private const val COPY = "copy the artifact again, or export it again"
    }
}
