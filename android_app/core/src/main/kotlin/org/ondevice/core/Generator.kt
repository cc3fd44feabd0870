package org.ondevice.core

import kotlin.math.sqrt

/**
 * The project's counter-based generator (`runtime_ops/generator.py`): SplitMix64's finaliser over a chain of
 * counters, Gaussians by Box-Muller in float32. The app needs it for one thing, the frozen A matrices of an
 * adapter; the program makes its own noise.
 *
 * Words are bit-identical everywhere. Normals have the bits of numpy on x86-64 with fused multiply-add, whose
 * `log`, `sin` and `cos` [Float32Math] follows.
 */
internal object Generator {
    private const val GAMMA = -0x61c8864680b583ebL
    private const val MULTIPLIER_1 = -0x40a7b892e31b1a47L
    private const val MULTIPLIER_2 = -0x6b2fb644ecceee15L
    private const val TWO_PI = 6.283185307179586f

    fun mix(value: Long): Long {
        val first = (value xor (value ushr 30)) * MULTIPLIER_1
        val second = (first xor (first ushr 27)) * MULTIPLIER_2
        return second xor (second ushr 31)
    }

    /** The 64-bit key of one stream. */
    fun streamKey(seed: Long, step: Long, query: Long, tensor: Long): Long =
        longArrayOf(step, query, tensor).fold(mix(seed + GAMMA)) { key, counter -> mix(key + GAMMA * (counter + 1)) }

    /** Word number [index] of the stream with this key. */
    fun word(key: Long, index: Long): Long = mix(key + GAMMA * (index + 1))

    /** Elements [start] to `start + count - 1` of one query's stream of standard normals, float32 [count]. */
    fun normal(seed: Long, step: Long, tensor: Long, query: Long, start: Long, count: Int): FloatArray {
        val key = streamKey(seed, step, query, tensor)
        return FloatArray(count) { place ->
            val element = start + place
            val word = word(key, element shr 1)
            val uniform = ((word ushr 32).toFloat() + 0.5f) * 2.3283064E-10f
            val turn = ((word and 0xffffff).toFloat() - 8388608f) * 5.9604645E-8f
            val angle = TWO_PI * turn
            val radius = sqrt(-2f * Float32Math.log(uniform))
            radius * if (element and 1L == 0L) Float32Math.cos(angle) else Float32Math.sin(angle)
        }
    }
}

/**
 * `log`, `sin` and `cos` in float32 with the bits of numpy's vector forms (a rational approximation of degree 5
 * over 5; Cody-Waite reduction by pi/2 and short polynomials), so that an adapter's frozen A is the one that
 * the program and Python have. Right within 4 units in the last place.
 */
internal object Float32Math {
    private val LOG_P = floatArrayOf(0.0f, 1.0f, 2.112677543073053f, 1.4800006335765065f, 0.38088377413884081f, 0.025899791179079227f)
    private val LOG_Q = floatArrayOf(1.0f, 2.6126775430731092f, 2.4530060717847364f, 0.98649429585194184f, 0.15464763749839067f, 0.0058750954031245743f)
    private const val LOG_2 = 0.69314718055994531f
    private const val SQRT_HALF = 0.70710678118654752f
    private const val TWO_OVER_PI = 0.63661975f
    private const val ROUNDING = 12582912f
    private val HALF_PI = floatArrayOf(bits(0xbfc90fd8), bits(0xb4a8885a), bits(0xa7c234c4))
    private val COS = floatArrayOf(bits(0x37cc730b), bits(0xbab6036e), bits(0x3d2aaa9e), -0.5f, 1.0f)
    private val SIN = floatArrayOf(bits(0x363e9dde), bits(0xb95035dd), bits(0x3c0888cd), bits(0xbe2aaaab), 0.0f)

    /** Of a normal, positive [x]. */
    fun log(x: Float): Float {
        val raw = x.toRawBits()
        var exponent = ((raw ushr 23) - 126).toFloat()
        var mantissa = Float.fromBits((raw and 0x7fffff) or (126 shl 23))
        if (mantissa <= SQRT_HALF) {
            mantissa += mantissa
            exponent -= 1f
        }
        val rest = mantissa - 1f
        return fma(exponent, LOG_2, descending(LOG_P, rest) / descending(LOG_Q, rest))
    }

    fun sin(x: Float): Float = turn(x, 0)

    fun cos(x: Float): Float = turn(x, 1)

    private fun turn(x: Float, quarters: Int): Float {
        val quadrant = (x * TWO_OVER_PI + ROUNDING) - ROUNDING
        var rest = x
        for (part in HALF_PI) rest = fma(quadrant, part, rest)
        val square = rest * rest
        val place = quadrant.toInt() + quarters
        val value = if (place and 1 == 0) fma(ascending(SIN, square), rest, rest) else ascending(COS, square)
        return if (place and 2 != 0) -value else value
    }

    private fun descending(coefficients: FloatArray, x: Float): Float {
        var sum = coefficients.last()
        for (index in coefficients.size - 2 downTo 0) sum = fma(sum, x, coefficients[index])
        return sum
    }

    private fun ascending(coefficients: FloatArray, x: Float): Float {
        var sum = coefficients[0]
        for (index in 1 until coefficients.size) sum = fma(sum, x, coefficients[index])
        return sum
    }

    /** a * b + c rounded once: exact product in float64, sum rounded to odd, then to float32 (Math.fma needs API 33). */
    fun fma(a: Float, b: Float, c: Float): Float {
        val product = a.toDouble() * b.toDouble()
        val sum = product + c
        val part = sum - product
        val error = (product - (sum - part)) + (c - part)
        if (error == 0.0) return sum.toFloat()
        val raw = sum.toRawBits()
        if (raw and 1L != 0L) return sum.toFloat()
        return Double.fromBits(if ((error > 0) == (sum > 0)) raw + 1 else raw - 1).toFloat()
    }

    private fun bits(value: Long): Float = Float.fromBits(value.toInt())
}
