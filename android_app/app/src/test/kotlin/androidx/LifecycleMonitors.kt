package androidx.test.internal.runner.lifecycle

import android.app.Activity
import android.app.Application
import androidx.test.runner.lifecycle.ActivityLifecycleMonitor
import androidx.test.runner.lifecycle.ApplicationLifecycleMonitor
import androidx.test.runner.lifecycle.ApplicationStage
import androidx.test.runner.lifecycle.Stage
import java.util.WeakHashMap

class ActivityLifecycleMonitorImpl : ActivityLifecycleMonitor {
    private val stages = WeakHashMap<Activity, Stage>()

    override fun getLifecycleStageOf(activity: Activity): Stage =
        stages[activity] ?: throw IllegalArgumentException("an activity that this monitor has not seen: $activity")

    fun signalLifecycleChange(stage: Stage, activity: Activity) {
        stages[activity] = stage
    }
}

class ApplicationLifecycleMonitorImpl : ApplicationLifecycleMonitor {
    fun signalLifecycleChange(
        @Suppress("UNUSED_PARAMETER") application: Application,
        @Suppress("UNUSED_PARAMETER") stage: ApplicationStage,
    ) = Unit
}
