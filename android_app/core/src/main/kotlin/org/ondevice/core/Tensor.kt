package org.ondevice.core

/** Element types that a program's inputs and outputs have; [manifestName] is how the manifest writes them. */
enum class DType(val manifestName: String, val bytes: Int) {
    INT64("int64", 8),
    FLOAT32("float32", 4),
}

/**
 * A dense row-major tensor on the host: int64 or float32.
 *
 * @property shape lengths of the dimensions; their product is the number of elements.
 */
class Tensor private constructor(
    val dtype: DType,
    val shape: LongArray,
    private val longValues: LongArray?,
    private val floatValues: FloatArray?,
) {
    val count: Int get() = longValues?.size ?: floatValues!!.size

    /** The elements of an int64 tensor, not copied. */
    fun longs(): LongArray = longValues ?: throw wrong("int64")

    /** The elements of a float32 tensor, not copied. */
    fun floats(): FloatArray = floatValues ?: throw wrong("float32")

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

        private fun check(size: Int, shape: LongArray) {
            val expected = shape.fold(1L) { product, length -> product * length }
            require(size.toLong() == expected) { "$size elements do not fill the shape ${shape.toList()}" }
        }
    }
}
