package org.ondevice.core

/**
 * What happens in a run, one JSON object a line in `events.jsonl`: names and fields of `ondevice/training/events.py`.
 *
 * @property kind the event's name.
 * @property timeS seconds since the epoch.
 */
sealed class Event(val kind: String) {
    abstract val timeS: Double

    protected abstract fun fields(): Map<String, Any?>

    fun toJson(): Map<String, Any?> = linkedMapOf<String, Any?>("event" to kind, "time_s" to timeS) + fields()

    /** One line of `events.jsonl`, ending in a line feed. */
    fun toLine(): ByteArray = (Json.write(toJson()) + "\n").toByteArray(Charsets.UTF_8)

    /**
     * The head of a log.
     *
     * @property config what the run was started with, as JSON values.
     * @property identity the settings that make two runs the same run; a resume must have the same.
     * @property steps steps asked for.
     * @property data what was read: the sequences.
     */
    data class Start(
        val config: Map<String, Any?>,
        val identity: Map<String, Any?>,
        val seed: Long,
        val backend: String,
        val generatorBackend: String,
        val modelSource: String,
        val modelSha256: String,
        val steps: Int,
        val data: Map<String, Any?>,
        override val timeS: Double = now(),
    ) : Event("start") {
        override fun fields() = linkedMapOf(
            "schema" to SCHEMA_VERSION, "config" to config, "identity" to identity, "seed" to seed, "backend" to backend,
            "generator_backend" to generatorBackend, "model_source" to modelSource, "model_sha256" to modelSha256, "steps" to steps,
            // The app trains with the method and the length that the program was exported for: it decides nothing itself.
            "said" to emptyList<String>(), "decided" to emptyMap<String, Any?>(), "data" to data, "environment" to environment(),
        )
    }

    /** Returns what can change the last bits of a run, under the names that Python's log uses. */
    protected fun environment() = mapOf("processor" to System.getProperty("os.arch"), "os" to System.getProperty("os.version"))

    /** The run goes on; [step] is the first step that is run again, [checkpoint] its folder or "". */
    data class Resume(
        val step: Int, val steps: Int, val backend: String, val checkpoint: String, override val timeS: Double = now(),
    ) : Event("resume") {
        override fun fields() = linkedMapOf(
            "step" to step, "steps" to steps, "backend" to backend, "checkpoint" to checkpoint,
            "changed" to emptyMap<String, Any?>(), // the app resumes with the settings that the run has
        )
    }

    /** One optimizer step; [tokens] are those of the batch, padding included. Times in seconds, memory in bytes. */
    data class Step(
        val step: Int,
        val loss: Double,
        val losses: List<Float>,
        val projectedGradients: List<Float>,
        val learningRate: Double,
        val tokens: Int,
        val stepTimeS: Double,
        val tokensPerS: Double,
        val peakMemoryBytes: Long,
        val etaS: Double,
        val preferences: Map<String, Double>? = null,
        override val timeS: Double = now(),
    ) : Event("step") {
        val stepsPerS: Double get() = if (stepTimeS > 0) 1 / stepTimeS else 0.0

        override fun fields() = linkedMapOf(
            "step" to step, "loss" to loss, "losses" to losses, "projected_gradients" to projectedGradients,
            "learning_rate" to learningRate, "tokens" to tokens, "step_time_s" to stepTimeS, "tokens_per_s" to tokensPerS,
            "peak_memory_bytes" to peakMemoryBytes, "peak_device_bytes" to null, "eta_s" to etaS, "overlap" to null, "experts" to null, "preferences" to preferences,
        )
    }

    /** An evaluation after [step] steps; [best] when no earlier one of the run was better. */
    data class Evaluate(
        val step: Int,
        val loss: Double,
        val accuracy: Double?,
        val majorityShare: Double?,
        val rows: Int,
        val secondsS: Double,
        val best: Boolean,
        val preferences: Map<String, Double>? = null,
        override val timeS: Double = now(),
    ) : Event("evaluate") {
        override fun fields() = linkedMapOf(
            "step" to step, "loss" to loss, "accuracy" to accuracy, "f1" to null, "exact_match" to null,
            "majority_share" to majorityShare, "metric" to null, "metric_value" to null, "preferences" to preferences, "rows" to rows, "seconds_s" to secondsS, "best" to best,
        )
    }

    /** A checkpoint was written after [step] steps; [path] is its folder inside the run's folder. */
    data class Checkpoint(
        val step: Int, val path: String, val sizeBytes: Long, val secondsS: Double, override val timeS: Double = now(),
    ) : Event("checkpoint") {
        override fun fields() = linkedMapOf("step" to step, "path" to path, "size_bytes" to sizeBytes, "seconds_s" to secondsS)
    }

    /** Something that the user should know and that does not end the run; pauses are told this way. */
    data class Warning(val message: String, val step: Int?, override val timeS: Double = now()) : Event("warning") {
        override fun fields() = linkedMapOf("message" to message, "step" to step)
    }

    /** The run was asked to stop, and its state after [step] steps is saved. */
    data class Interrupt(val step: Int, val signal: String, override val timeS: Double = now()) : Event("interrupt") {
        override fun fields() = linkedMapOf("step" to step, "signal" to signal)
    }

    /** The run ended with an error ([OndeviceException.toJson]). */
    data class Error(val step: Int, val error: Map<String, Any?>, override val timeS: Double = now()) : Event("error") {
        override fun fields() = linkedMapOf("step" to step, "error" to error)
    }

    /** All steps are done; figures are over the whole run. */
    data class Finish(
        val steps: Int,
        val firstLoss: Double,
        val finalLoss: Double,
        val stepTimeS: Double,
        val tokensPerS: Double,
        val peakMemoryBytes: Long,
        override val timeS: Double = now(),
    ) : Event("finish") {
        override fun fields() = linkedMapOf(
            "steps" to steps, "first_loss" to firstLoss, "final_loss" to finalLoss, "step_time_s" to stepTimeS,
            "tokens_per_s" to tokensPerS, "peak_memory_bytes" to peakMemoryBytes, "reason" to "", // the app ends no run early
        )
    }

    companion object {
        const val SCHEMA_VERSION = 1

        internal fun now(): Double = System.currentTimeMillis() / 1000.0
    }
}
