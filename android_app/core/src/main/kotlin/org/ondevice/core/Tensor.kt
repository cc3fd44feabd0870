package org.ondevice.core

import java.nio.ByteBuffer

/**
 * Element types that a program's inputs and outputs have; [manifestName] is how the manifest writes them, [stored] how
 * a safetensors file does. Tensors of fewer than four bytes an element are weights of a [MappedWeights] file alone.
 */
enum class DType(val manifestName: String, val stored: String, val bytes: Int) {
    INT64("int64", "I64", 8),
    FLOAT32("float32", "F32", 4),
    FLOAT16("float16", "F16", 2),
    INT8("int8", "I8", 1),
    UINT8("uint8", "U8", 1),
}

/**
 * Rows of a tensor of the weights file, where the system has mapped them.
 *
 * @property name of the tensor in the file.
 * @property firstRow of the tensor's first dimension.
 * @property bytes direct, in the machine's byte order, not to be written to.
 */
class MappedRows(val name: String, val firstRow: Int, val bytes: ByteBuffer)

/**
 * A dense row-major tensor on the host: int64 or float32 in an array, or frozen weights in a mapped file.
 *
 * @property shape lengths of the dimensions; their product is the number of elements.
 * @property mapped set for frozen weights, which have no array.
 */
class Tensor private constructor(
    val dtype: DType,
    val shape: LongArray,
    private val longValues: LongArray?,
    private val floatValues: FloatArray?,
    val mapped: MappedRows? = null,
) {
    val count: Int get() = longValues?.size ?: floatValues?.size ?: (mapped!!.bytes.capacity() / dtype.bytes)

    /** The elements of an int64 tensor, not copied. */
    fun longs(): LongArray = longValues ?: throw wrong("int64")

    /** The elements of a float32 tensor, not copied. */
    fun floats(): FloatArray = floatValues ?: throw wrong("float32")

    /** The same elements, not copied, in another shape of as many. */
    fun reshaped(shape: LongArray): Tensor = Tensor(dtype, shape.also { check(count, it) }, longValues, floatValues, mapped)

    override fun toString(): String = "${dtype.manifestName} ${shape.toList()}"

    private fun wrong(expected: String) =
        artifactError("a tensor has another dtype", expected, dtype.manifestName, "export the artifact again")

    companion object {
        fun of(values: LongArray, vararg shape: Long): Tensor {
            check(values.size, shape)
            return Tensor(DType.INT64, shape, values, null)
        }

        fun of(values: FloatArray, vararg shape: Long): Tensor {
            check(values.size, shape)
            return Tensor(DType.FLOAT32, shape, null, values)
        }

        fun of(rows: MappedRows, dtype: DType, vararg shape: Long): Tensor {
            check(rows.bytes.capacity() / dtype.bytes, shape)
            return Tensor(dtype, shape, null, null, rows)
        }

        private fun check(size: Int, shape: LongArray) {
            val expected = shape.fold(1L) { product, length -> product * length }
            require(size.toLong() == expected) { "$size elements do not fill the shape ${shape.toList()}" }
        }
    }
}
