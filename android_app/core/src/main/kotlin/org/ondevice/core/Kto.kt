package org.ondevice.core

import kotlin.math.max
import kotlin.math.tanh

/**
 * Kahneman-Tversky optimisation over rated answers (Ethayarajh et al., arXiv 2402.01306, equation 8): the formula of
 * `ondevice/objectives/kto.py`, in its order of operations.
 *
 * The loss of a liked answer is 1 - sigmoid(beta (log ratio - KL)), that of another 1 - sigmoid(beta (KL - log ratio)). KL is
 * the mean log ratio of other rows' answers after these rows' prompts, at least 0; it has no gradient.
 */
data class Kto(val beta: Double = 0.1, val desirableWeight: Double = 1.0, val undesirableWeight: Double = 1.0) {
    /**
     * @property loss mean over the answers.
     * @property coefficients dL / d(log p) of each answer.
     * @property figures under the names that Python's events have.
     * @property right answers on the right side of the KL.
     */
    class Graded(val loss: Double, val coefficients: DoubleArray, val figures: Map<String, Double>, val right: BooleanArray)

    /**
     * Grade n answers by their log likelihoods, nats summed over an answer.
     *
     * @param answers log p less its value before training, of each answer.
     * @param others the same of another row's answer after the same prompt.
     */
    fun grade(answers: DoubleArray, others: DoubleArray, liked: BooleanArray): Graded {
        val kl = max(0.0, Means.mean(others))
        val count = answers.size
        val losses = DoubleArray(count)
        val slopes = DoubleArray(count)
        val rewards = DoubleArray(count) { beta * answers[it] }
        for (row in 0 until count) {
            val sign = if (liked[row]) 1.0 else -1.0
            val weight = if (liked[row]) desirableWeight else undesirableWeight
            val value = sigmoid(sign * beta * (answers[row] - kl))
            losses[row] = weight * (1 - value)
            slopes[row] = -weight * sign * beta * value * (1 - value) / count
        }
        val right = BooleanArray(count) { (rewards[it] > beta * kl) == liked[it] }
        val figures = linkedMapOf("accuracy" to right.count { it }.toDouble() / count, "kl" to kl)
        for ((name, side) in listOf("rewards_chosen" to true, "rewards_rejected" to false)) {
            val some = rewards.filterIndexed { row, _ -> liked[row] == side }
            if (some.isNotEmpty()) figures[name] = Means.mean(some.toDoubleArray())
        }
        if (figures.size == 4) figures["margin"] = figures.getValue("rewards_chosen") - figures.getValue("rewards_rejected")
        return Graded(Means.mean(losses), slopes, figures, right)
    }

    /** What a resumed run must have in common with the run. */
    internal fun identity(): Map<String, Any?> = linkedMapOf(
        "objective" to NAME, "objective_command" to null, "beta" to beta,
        "desirable_weight" to desirableWeight, "undesirable_weight" to undesirableWeight,
    )

    companion object {
        const val NAME = "kto"

        private fun sigmoid(x: Double) = 0.5 * (1.0 + tanh(0.5 * x))
    }
}
