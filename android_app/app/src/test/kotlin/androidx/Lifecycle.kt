package androidx.test.runner.lifecycle

import android.app.Activity

enum class Stage { PRE_ON_CREATE, CREATED, STARTED, RESUMED, PAUSED, STOPPED, RESTARTED, DESTROYED }

enum class ApplicationStage { PRE_ON_CREATE, CREATED }

interface ActivityLifecycleMonitor {
    fun getLifecycleStageOf(activity: Activity): Stage
}

interface ApplicationLifecycleMonitor

object ActivityLifecycleMonitorRegistry {
    private lateinit var monitor: ActivityLifecycleMonitor

    @JvmStatic
    fun getInstance(): ActivityLifecycleMonitor = monitor

    @JvmStatic
    fun registerInstance(monitor: ActivityLifecycleMonitor) {
        this.monitor = monitor
    }
}

object ApplicationLifecycleMonitorRegistry {
    @JvmStatic
    fun registerInstance(@Suppress("UNUSED_PARAMETER") monitor: ApplicationLifecycleMonitor) = Unit
}
