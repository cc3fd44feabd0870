package org.ondevice.core

import kotlin.math.exp
import kotlin.random.Random

/**
 * How an answer is drawn, and what ends it.
 *
 * @property maxTokens longest answer.
 * @property temperature 0 takes the most likely token; above, tokens are drawn with [seed].
 * @property topP draw among the likeliest tokens whose probabilities reach this sum.
 * @property stop texts that end an answer, and are no part of it.
 */
class Sampling(
    val maxTokens: Int = 32,
    val temperature: Float = 0f,
    val topP: Float = 1f,
    val seed: Long = 0,
    val stop: List<String> = emptyList(),
) {
    init {
        if (maxTokens < 1 || !(temperature >= 0f) || !(topP > 0f && topP <= 1f) || stop.any { it.isEmpty() }) {
            throw dataError(
                "an answer cannot be drawn like that", "at least one token, a temperature of 0 or more, a top-p above 0 and at most 1",
                "$maxTokens tokens, temperature $temperature, top-p $topP", "correct the numbers",
            )
        }
    }

    /** The same, and [text] ends an answer. */
    internal fun endingAt(text: String) = Sampling(maxTokens, temperature, topP, seed, stop + text)

    /** Index of the next token: the highest logit, or one drawn from the softmax of `logits / temperature`. */
    internal fun pick(logits: FloatArray, random: Random): Int {
        val best = logits.indices.maxByOrNull { if (logits[it].isNaN()) Float.NEGATIVE_INFINITY else logits[it] } ?: 0
        if (temperature <= 0f) return best
        val weights = DoubleArray(logits.size) { if (logits[it].isNaN()) 0.0 else exp((logits[it] - logits[best]).toDouble() / temperature) }
        val among = likeliest(weights)
        var left = random.nextDouble() * among.sumOf { weights[it] }
        for (index in among) {
            left -= weights[index]
            if (left < 0) return index
        }
        return best
    }

    /** The fewest indices whose weights are [topP] of all, at least one; all of them in their order where that is 1. */
    private fun likeliest(weights: DoubleArray): List<Int> {
        val indices = weights.indices.toList()
        if (topP >= 1f) return indices
        val wanted = topP * weights.sum()
        var sum = 0.0
        return indices.sortedByDescending { weights[it] }.takeWhile { index -> (sum < wanted).also { sum += weights[index] } }
    }

    /** Where the first of [stop] begins in [text], or -1. */
    internal fun end(text: String): Int = stop.map { text.indexOf(it) }.filter { it >= 0 }.minOrNull() ?: -1
}
