package org.ondevice.core

/**
 * What the user chooses for a run; the rest is the artifact's.
 *
 * @property learningRate peak of the schedule.
 * @property checkpointEvery steps between two checkpoints; a pause, a stop, the end and a best evaluation save one too.
 * @property evalEvery steps between two evaluations; 0 for only one before the first step and one at the end.
 * @property evalRows evaluate only the first so many rows; null for all.
 * @property evaluateBefore evaluate before the first step, for before and after.
 */
data class TrainSettings(
    val steps: Int,
    val learningRate: Double,
    val schedule: ScheduleKind = ScheduleKind.CONSTANT,
    val warmupSteps: Int = 0,
    val checkpointEvery: Int = 25,
    val evalEvery: Int = 0,
    val evalRows: Int? = null,
    val evaluateBefore: Boolean = true,
) {
    init {
        if (steps < 1) throw configError("a run has at least one step", "1 or more", steps)
        if (checkpointEvery < 1) throw configError("checkpoint_every is too small", "1 or more", checkpointEvery)
        if (evalEvery < 0) throw configError("eval_every is negative", "0 or more", evalEvery)
        if (evalRows != null && evalRows < 1) throw configError("eval_rows is too small", "1 or more", evalRows)
    }

    internal fun toJson(): Map<String, Any?> = linkedMapOf(
        "steps" to steps, "schedule" to schedule.manifestName, "warmup_steps" to warmupSteps,
        "checkpoint_every" to checkpointEvery, "eval_every" to evalEvery, "eval_rows" to evalRows,
    )
}

/** Where a [Trainer] stands. */
sealed class TrainerState {
    /** Not started. */
    object Idle : TrainerState() {
        override fun toString() = "Idle"
    }

    /** Steps are run; [activity] is `training`, `evaluating` or `saving`. */
    data class Running(val step: Int, val steps: Int, val activity: String = "training") : TrainerState()

    /** Held after [step] steps, with a checkpoint saved; goes on by itself when the [reasons] are gone. */
    data class Paused(val step: Int, val steps: Int, val reasons: Set<PauseReason>) : TrainerState()

    /** The end: all steps, or stopped by the user with its state saved. */
    data class Finished(val result: RunResult) : TrainerState()

    /** The end by an error; checkpoints stay. */
    data class Failed(val step: Int, val error: OndeviceException) : TrainerState()
}

/**
 * What a run came to, the parts before a resume included.
 *
 * @property finalLoss mean loss of the last tenth of the steps (at least one).
 * @property stepTimeS median seconds of a step.
 * @property interrupted stopped before its end.
 * @property before evaluation before the first step, if there was one in this part of the run.
 * @property evaluation the last evaluation of this part of the run.
 */
data class RunResult(
    val steps: Int,
    val firstLoss: Double,
    val finalLoss: Double,
    val stepTimeS: Double,
    val tokensPerS: Double,
    val peakMemoryBytes: Long,
    val interrupted: Boolean,
    val before: EvalResult? = null,
    val evaluation: EvalResult? = null,
)

/** Told of a run as it happens, on the training thread: return quickly. */
interface TrainerListener {
    fun onState(state: TrainerState) {}

    fun onEvent(event: Event) {}
}
