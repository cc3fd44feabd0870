package org.ondevice.core

import kotlin.math.PI
import kotlin.math.cos
import kotlin.math.max
import kotlin.math.min

/** The shape of the learning rate after the warmup. */
enum class ScheduleKind(val manifestName: String) { CONSTANT("constant"), LINEAR("linear"), COSINE("cosine") }

/**
 * Linear warmup to [peak], then constant, linear or cosine decay to `peak * finalFraction`: a pure function of
 * the step, the same arithmetic in float64 as `ondevice/training/schedule.py`.
 *
 * @property steps steps of the whole run; the last is `steps - 1` and has the final rate.
 * @property warmupSteps step s below it has `peak * (s + 1) / (warmupSteps + 1)`.
 */
class Schedule(
    val kind: ScheduleKind,
    val peak: Double,
    val steps: Int,
    val warmupSteps: Int = 0,
    val finalFraction: Double = 0.0,
) {
    init {
        if (warmupSteps !in 0 until steps) {
            throw configError(
                "the warmup must end before the run does", "0 <= warmup_steps < $steps (steps)", warmupSteps,
                "fewer warmup steps, or more steps",
            )
        }
        if (!(peak.isFinite() && peak > 0 && finalFraction in 0.0..1.0)) {
            throw configError(
                "a learning rate must be positive and its final fraction between 0 and 1",
                received = "learning_rate $peak, final_fraction $finalFraction",
            )
        }
    }

    /** The learning rate of a step, counted from 0. */
    fun at(step: Int): Double {
        if (step < warmupSteps) return peak * (step + 1) / (warmupSteps + 1)
        val span = max(1, steps - 1 - warmupSteps)
        val done = min(1.0, (step - warmupSteps).toDouble() / span)
        val left = when (kind) {
            ScheduleKind.CONSTANT -> return peak
            ScheduleKind.LINEAR -> 1.0 - done
            ScheduleKind.COSINE -> 0.5 * (1.0 + cos(PI * done))
        }
        return peak * (finalFraction + (1.0 - finalFraction) * left)
    }
}
